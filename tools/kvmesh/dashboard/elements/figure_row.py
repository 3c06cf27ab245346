"""Figures with their names, side by side."""

from nicegui import ui


class FigureRow:
    """A row of figures with their names."""

    def __init__(self, *names: str) -> None:
        self._values = []
        with ui.element("dl").classes("figures"):
            for name in names:
                with ui.element("div").classes("figure"):
                    with ui.element("dt"):
                        ui.label(name)
                    with ui.element("dd"):
                        self._values.append(ui.label("–"))

    def set(self, *texts: str) -> None:
        """Show the values, in the order of the names."""
        for label, text in zip(self._values, texts, strict=True):
            label.text = text
