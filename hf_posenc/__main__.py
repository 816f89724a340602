"""`python -m hf_posenc` is the command `hf-posenc`."""

from hf_posenc.cli import main

main()
