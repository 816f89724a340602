"""llama.cpp's own converter, for folders whose tokenizer it does not know: `convert.py CONVERTER FOLDER FILE …`.

Nothing of it is changed but the vocabulary, which is left out: the embedded models spell in bytes, by a tokenizer that
the converter has no name for, and positions are what is tested. Run in an environment with torch and Transformers.
"""

import json
import sys
from pathlib import Path

converter, *pairs = sys.argv[1:]
home = Path(converter)
sys.path[:0] = [str(home / "gguf-py"), str(home)]

import conversion  # noqa: E402
import convert_hf_to_gguf  # noqa: E402


def without_vocabulary(self) -> None:  # type: ignore[no-untyped-def]
    """Stands in for `set_vocab`."""
    self._set_vocab_none()
    self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])


for folder, file in zip(pairs[::2], pairs[1::2]):
    architecture = json.loads(Path(folder, "config.json").read_text())["architectures"][0]
    conversion.get_model_class(architecture).set_vocab = without_vocabulary
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", file, "--outtype", "f32"]
    convert_hf_to_gguf.main()
