"""Files that are quantized already: where they are, what they are, and what they need. No torch.

Each is one stream beside its base, so that there is one subject. A file of another architecture
or another vocabulary is refused here, where both configurations are on this machine; the engine
checks it again when it opens the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from qaudit.checkpoints import folder as local
from qaudit.checkpoints.stamps import folder_of, hash_of, is_gguf, weights_of
from qaudit.core.scheme import Scheme, Shipped, label_for
from qaudit.errors import HubError, SourceError, UsageError
from qaudit.formats.gguf import reading as gguf
from qaudit.formats.gguf.header import bits_in, header_by, read_header
from qaudit.formats.weights import (
    QuantizedFolder,
    format_of,
    must_match,
    open_quantized,
    quantization_of,
)
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import find_all, is_hub, parse, revisions_of, with_files
from qaudit.hub.weights import weights_on_hub
from qaudit.planning.passes import Pricing, priced
from qaudit.saved.results import sha256_of
from qaudit.settings import EXAMPLE_SCHEMES
from qaudit.support.keys import nearest
from qaudit.types import Checkpoint, Pass, Ref, Subject, WeightFile, digest

_CONFIGURATIONS = ("config.json", "quantize_config.json", "quant_config.json")


def find_shipped(places: Sequence[str], hub: Hub | None = None) -> tuple[Checkpoint, ...]:
    """Return the files that are named, hashed, under labels that differ."""
    found = [_on_hub(place, hub) if is_hub(place) else _local(place) for place in places]
    names = []
    for file in found:
        folder = Path(file.ref.location.rstrip("/"))
        weights = weights_of(file, folder)
        names.append(label_for(weights.stem if weights != folder else folder.name))
    counts = Counter(names)
    labels = [
        name if counts[name] == 1 else label_for(str(file.ref))
        for name, file in zip(names, found, strict=True)
    ]
    if twice := [label for label, count in Counter(labels).items() if count > 1]:
        raise UsageError(f"`{twice[0]}` is shipped twice", hint="name each file once")
    return tuple(replace(file, label=label) for file, label in zip(found, labels, strict=True))


def _local(place: str) -> Checkpoint:
    path = Path(place)
    if path.is_file() and is_gguf(path):
        file = WeightFile(path.name, path.stat().st_size, hash_of(path))
        return Checkpoint(Ref(str(path.parent)), path.name, (file,))
    if not path.is_dir():
        what = "is a file that is not read" if path.exists() else "does not exist"
        raise UsageError(
            f"the shipped file `{place}` {what}",
            hint="name the folder of a quantized checkpoint, a `.gguf` file or `org/name`",
        )
    (checkpoint,) = local.with_hashes([Checkpoint(Ref(str(path)), path.name)])
    if not checkpoint.files:
        QuantizedFolder(path)  # raises the error that names the file
        raise SourceError(f"no weights in `{place}`", hint="download it again")
    return checkpoint


def _on_hub(place: str, hub: Hub | None) -> Checkpoint:
    hub = hub or open_hub()
    if is_gguf(place):
        return _file_on_hub(hub, place)
    found = with_files(hub.listing, find_all([place], None, lambda: hub.listing))
    if len(found) != 1 or not found[0].files:
        raise UsageError(
            f"`{place}` holds {len(found)} checkpoints with weights, and a shipped file is one",
            hint="write `org/name@revision`, `org/name@revision//folder`, or "
            "`org/name//file.gguf` for one of several",
        )
    return found[0]


def _file_on_hub(hub: Hub, target: str) -> Checkpoint:
    ref = parse(target)
    path = ref.subfolder or ""
    revision = revisions_of(hub.listing, Ref(ref.location, ref.revision, path))[0]
    files = {file.path: file for file in hub.listing.files(ref.location, revision.commit)}
    if path not in files:
        near = nearest(path, sorted(filter(is_gguf, files)) or sorted(files))
        raise HubError(f"there is no file `{path or target}` in `{ref.location}`", hint=near)
    folder, _, name = path.rpartition("/")
    return Checkpoint(
        Ref(ref.location, revision.name, folder or None),
        name,
        (WeightFile(name, files[path].nbytes, files[path].identity),),
        revision.commit,
    )


def all_shipped(
    subjects: Sequence[Subject],
    shipped: Sequence[Checkpoint],
    hub: Hub | None,
    schemes: Sequence[Scheme],
) -> tuple[tuple[Checkpoint, ...], tuple[Shipped, ...]]:
    """Return the files that are quantized already, and what each is measured as.

    A base that is one itself is the only one where nothing is measured beside it.
    """
    base = subjects[0].first
    if not shipped:
        if schemes:
            return (), ()
        if base.commit is not None and hub is not None and len(subjects) == 1:
            hub.fetcher.settings(base)
        if len(subjects) > 1 or subjects[0].merge or quantization_of(folder_of(base)) is None:
            raise UsageError(
                "no scheme is named, and no shipped file", hint=f"for example `{EXAMPLE_SCHEMES}`"
            )
        base = replace(base, label=label_for(base.label))
        return (base,), (_identified(base, *format_of(folder_of(base))),)
    if len(subjects) != 1 or subjects[0].is_search:
        raise UsageError(
            f"shipped files are compared with the one model they were made from, and "
            f"{len(subjects)} are measured",
            hint="name one checkpoint, or choose it with `--checkpoints`",
        )
    taken = {scheme.short for scheme in schemes}
    return tuple(shipped), tuple(_scheme(file, base, hub, taken) for file in shipped)


def _scheme(checkpoint: Checkpoint, base: Checkpoint, hub: Hub | None, taken: set[str]) -> Shipped:
    if checkpoint.label in taken:
        raise UsageError(
            f"the shipped file `{checkpoint.label}` has the name of a scheme",
            hint="rename its folder",
        )
    if (checkpoint.ref, checkpoint.files) == (base.ref, base.files):
        raise UsageError(
            f"`{checkpoint.label}` is the base itself, and not a file beside it",
            hint="leave out `--shipped`; with `--schemes none` a quantized base is run as it ships",
        )
    folder = folder_of(checkpoint)
    place = weights_of(checkpoint, folder)
    if checkpoint.commit is not None and is_gguf(place):  # its header is read, and no more of it
        (file,) = weights_on_hub(checkpoint)
        read = partial((hub or open_hub()).listing.read, checkpoint.ref.location, checkpoint.commit)
        header = (
            read_header(place)
            if place.is_file()
            else header_by(place, file.nbytes, partial(read, file, 0))
        )
        if (folder_of(base) / "config.json").is_file():
            gguf.must_match(checkpoint.label, header, folder_of(base))
        return _identified(checkpoint, "gguf", bits_in(header, place), 16)
    if checkpoint.commit is not None and hub is not None:
        hub.fetcher.settings(checkpoint)
    must_match(checkpoint.label, place, folder_of(base))
    return _identified(checkpoint, *format_of(place))


def _identified(checkpoint: Checkpoint, name: str, bits: int, act: int) -> Shipped:
    folder = folder_of(checkpoint)
    if checkpoint.commit is None:  # refuses stored tensors that do not fit together
        bits = open_quantized(weights_of(checkpoint, folder)).bits
    texts = [sha256_of(folder / name) for name in _CONFIGURATIONS if (folder / name).is_file()]
    identity = digest([checkpoint.content, texts])
    return Shipped(file=checkpoint.label, format=name, bits=bits, act=act, sha256=identity)


def with_shipped(subject: Subject, shipped: Sequence[Checkpoint]) -> Subject:
    if not shipped:
        return subject
    members = {(member.ref, member.files) for member, _ in subject.members}
    further = (c for c in dict.fromkeys(shipped) if (c.ref, c.files) not in members)
    return replace(subject, members=(*subject.members, *((c, 0.0) for c in further)))


def reading_shipped(step: Pass, shipped: Sequence[Checkpoint], pricing: Pricing) -> Pass:
    """Return a pass with the files that its schemes name, and their bytes in its price."""
    named = tuple(
        file for file in shipped if any(f":file={file.label}:" in spec for spec in step.schemes)
    )
    if not named:
        return step
    step = replace(step, shipped=named)
    if step.is_quantized:  # nothing runs beside it
        step = priced(replace(step, full_precision=False), pricing)
    nbytes = step.price.nbytes_read + sum(file.nbytes for file in named)
    return replace(step, price=replace(step.price, nbytes_read=nbytes))
