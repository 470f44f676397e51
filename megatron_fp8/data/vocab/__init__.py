"""The kinds of tokenizers, one file each, all with the methods of `backend.Backend`."""
