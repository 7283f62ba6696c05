"""Here so that pytest puts this folder on sys.path: tests import ``tiny_tokenizers`` from it."""
