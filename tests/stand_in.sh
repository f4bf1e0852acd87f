#!/bin/sh
# Python, as a warm command of tests/commands.py finds it in sys.executable: `-m zinfer` becomes a warm process too.
if [ "$1 $2" = "-m zinfer" ]; then
    exec "$ZINFER_TESTS_PYTHON" -c "import sys; sys.path.insert(0, '${0%/*}'); from stand_in import main; main()" "$@"
fi
exec "$ZINFER_TESTS_PYTHON" "$@"
