#!/bin/sh
# Python, as a warm command of tests/commands.py finds it in sys.executable: `-m zinfer` becomes a warm process too.
# What stands in for it finds packages for that process, and leaves `sitecustomize` to it.
if [ "$1 $2" = "-m zinfer" ]; then
    paths="import site, sys; site.addsitepackages(site.venv(site.removeduppaths())); sys.path.insert(0, '${0%/*}')"
    exec "$ZINFER_TESTS_PYTHON" -S -c "$paths; from stand_in import main; main()" "$@"
fi
exec "$ZINFER_TESTS_PYTHON" "$@"
