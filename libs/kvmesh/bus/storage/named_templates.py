"""Named chat templates of a model folder, in the form that transformers writes."""

from pathlib import Path

TEMPLATES = "additional_chat_templates"


def additional_templates(folder: Path) -> list[str]:
    """The files of a folder's named templates, relative to it, in order."""
    found = sorted((folder / TEMPLATES).glob("*.jinja"))
    return [f"{TEMPLATES}/{path.name}" for path in found if path.is_file()]


def template_name(file: str) -> str:
    """The name of the template in a file of a model; empty if it is no named template."""
    folder, _, name = file.rpartition("/")
    return name.removesuffix(".jinja") if folder == TEMPLATES and name.endswith(".jinja") else ""
