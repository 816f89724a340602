"""What there is, for the terminal: the encodings with their options, and which architecture takes which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

SHARED_OPTIONS = ("rope_theta", "original_max_position_embeddings")


def option_lines(row: Any) -> list[str]:
    """One line an option: required, its default, or its choices."""
    from dataclasses import MISSING, fields
    from typing import Literal, get_args, get_origin, get_type_hints

    hints, lines = get_type_hints(row.cls), []
    for field in fields(row.cls):
        if field.name in SHARED_OPTIONS:
            continue
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        kinds = (hints[field.name],) if get_origin(hints[field.name]) is Literal else kinds
        choices = [str(c) for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
        default = "" if field.default in (MISSING, None) else f"={field.default}"
        note = " (required)" if field.default is MISSING else f" ({' | '.join(choices)})" if choices else ""
        lines.append(f"{field.name}{default}{note}")
    return lines


def encodings_table() -> tuple[Table, str]:
    """Every encoding with its seam, its options and its source, and what goes for all rotations."""
    from rich.table import Table

    import hf_posenc

    table = Table(title="Encodings: hf_posenc.patch_model(model, NAME, **options)", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("options", no_wrap=True)
    for column in ("what it does", "source"):
        table.add_column(column)
    for row in hf_posenc.list_encodings():
        table.add_row(row.name, "\n".join(option_lines(row)), f"{row.seam}: {row.summary}", row.paper)
    shared = (
        "Every rotation also takes rope_theta (default: the host's) and original_max_position_embeddings, the trained "
        "length (default: the config's; BLOOM states none)."
    )
    return table, shared


def support_table() -> tuple[Table, list[str]]:
    """Architectures by encoding, and a line with the reason for each pair that is refused."""
    from rich.table import Table

    import hf_posenc

    rows = hf_posenc.list_encodings()
    table = Table(title="Architectures (model_type) by encoding", title_justify="left")
    table.add_column("architecture", no_wrap=True)
    for row in rows:
        table.add_column(row.name, justify="center")
    reasons = []
    for architecture in hf_posenc.list_architectures():
        answers = {row.name: hf_posenc.support(architecture, row.name) for row in rows}
        table.add_row(architecture, *("yes" if answer.ok else "no" for answer in answers.values()))
        reasons += [f"{name} on {architecture}: {answer.reason}" for name, answer in answers.items() if not answer.ok]
    return table, reasons
