"""The import path of DeepSpeed's transformer operators."""

from zinfer.ops.transformer import inference as inference
