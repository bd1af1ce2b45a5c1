"""llama.cpp's own converter on tiny models: a process that reads folders and writes GGUF files.

The converter is of the source that the wheel in `.peers/llamacpp` was built from, beside which
`make peers` puts it, with its own newer `gguf`. Vocabularies are left out: they are compared apart.
"""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import yaml

from tests.zoo import tiny

CONVERTER = Path(sys.prefix) / "converter"
TYPES = yaml.safe_load(Path(__file__).with_name("gguf_types.yaml").read_text(encoding="utf-8"))
"""Types that are read, and wrappers of some: what their tiny models need."""

TOKENS = [(7 * j) % 251 + 3 for j in range(40)]


def make(folder, model_type):
    """Save a tiny model with the configuration that its releases have; return it."""
    case = TYPES[model_type]
    with patch.dict(tiny.TABLES["types"], case.get("text") or {}):
        kind = tiny.save(folder, model_type, case.get("changes"))
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    for module in model.modules():
        if "epsilon" in case and hasattr(module, "variance_epsilon"):
            module.variance_epsilon = case["epsilon"]
    size = model.config.get_text_config().vocab_size
    words = {"model": {"vocab": {f"t{k}": k for k in range(size)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, **(case.get("written") or {})}), encoding="utf-8")
    return model


class Converter:
    """The converter in a process of its own, which stays."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.support.converter"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, folder, out):
        assert self._process.stdin and self._process.stdout
        print(json.dumps([str(folder), str(out)]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer == "converted\n", "the converter ended with what it says on stderr"

    def close(self):
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def _with_those_below(kind):
    yield kind
    for below in kind.__subclasses__():
        yield from _with_those_below(below)


def main(answers):
    sys.path[:0] = [str(CONVERTER), str(CONVERTER / "gguf-py")]
    import conversion
    import gguf
    from transformers import AutoConfig

    def not_read(*_):
        raise ValueError("`config.json` is read as it is")

    AutoConfig.from_pretrained = not_read

    def without_words(self):
        self.gguf_writer.add_tokenizer_model("none")
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    for line in sys.stdin:
        folder, out = (Path(path) for path in json.loads(line))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = conversion.get_model_class(config["architectures"][0])
        for below in _with_those_below(conversion.ModelBase):
            if "set_vocab" in vars(below):
                below.set_vocab = without_words
        kind.no_mtp = True
        with torch.inference_mode():
            kind(folder, gguf.LlamaFileType.ALL_F32, out, eager=True).write()
        print("converted", file=answers, flush=True)


if __name__ == "__main__":
    main(sys.stdout)
