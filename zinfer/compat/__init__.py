"""DeepSpeed's API beside its engines: names that scripts import, over what zinfer has."""
