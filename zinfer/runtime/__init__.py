"""The import path of DeepSpeed's runtime."""

from zinfer.runtime import utils as utils
