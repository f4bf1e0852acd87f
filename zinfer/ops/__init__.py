"""The import path of DeepSpeed's inference operators."""

from zinfer.ops import transformer as transformer
