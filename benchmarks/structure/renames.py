"""Renames that are intended: how a tree that has them is asked, and what it says is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Renames:
    """What is called otherwise in the tree AFTER, each as old name: new name.

    Attributes:
        commands: whole commands, such as ``inspect spectra``.
        recipe_keys: keys at the top of a recipe.
        inner_keys: keys inside sections of recipes, configurations and reports; a tree has them
            that has a new key at the top of a recipe.
        files: names of files that are written, and ends of their folders.
        hidden: the command line of a help page, and the option that it no longer lists.
    """

    commands: dict[str, str]
    recipe_keys: dict[str, str]
    inner_keys: dict[str, str]
    files: dict[str, str]
    hidden: dict[str, str] = field(default_factory=dict[str, str])

    def had_by(self, help_of: Callable[[str], str], known_keys: str) -> Renames:
        """Return those that a tree has; it may have none yet.

        Files are not asked for: they are looked at when there are some.

        Args:
            help_of: returns the help of the group that a command is in, given the group's name.
            known_keys: what the tree says of an unknown key, which lists those that it knows.
        """

        def has(new: str) -> bool:
            group, _, word = new.rpartition(" ")
            return word in help_of(group).split()

        keys = set(re.findall(r"\w+", known_keys))
        recipe_keys = {old: new for old, new in self.recipe_keys.items() if new in keys}
        return Renames(
            {old: new for old, new in self.commands.items() if has(new)},
            recipe_keys,
            self.inner_keys if recipe_keys else {},
            self.files,
            self.hidden,
        )

    def in_arguments(self, arguments: list[str]) -> list[str]:
        """Return the arguments of a command in the new words."""
        found = list(arguments)
        for old, new in self.commands.items():
            words = old.split()
            if found[: len(words)] == words:
                found[: len(words)] = new.split()
        for at, option in enumerate(found[:-1]):
            if option == "--set":
                found[at + 1] = self.in_recipe(found[at + 1])
        return found

    def in_recipe(self, text: str) -> str:
        """Return a recipe, or one setting of it, with the new keys."""
        for old, new in self.recipe_keys.items():
            text = re.sub(rf"^{re.escape(old)}(?=[:.=])", new, text, flags=re.MULTILINE)
        for old, new in self.inner_keys.items():
            text = re.sub(rf"\b{re.escape(old)}(?=[:=])", new, text)
        return text

    def old_path(self, path: str) -> str:
        """Return the path of a file in the old names."""
        for old, new in self.files.items():
            path = re.sub(rf"(^|/){re.escape(new)}(?=/|$)", rf"\g<1>{old}", path)
        return path

    def undone(self, text: str) -> str:
        """Return a text with the old words in place of the new ones."""
        for old, new in self._words():
            text = re.sub(rf"\b{re.escape(new)}\b", old, text)
        return text

    def undone_in_letters(self, text: str) -> str:
        """Do the same, and leave out blanks and frames, which follow the length of the words."""
        text = re.sub(r"[\s─│╭╮╰╯]+", "", text)
        for old, new in self._words():
            text = text.replace(new, old)
        return text

    def without_hidden(self, line: str, text: str) -> str:
        """Return the page of a command without the option that is hidden AFTER."""
        option = self.hidden.get(line)
        return text if option is None else re.sub(rf"(?m)^│ {option}\b.*\n", "", text)

    def undone_in_any_order(self, text: str) -> str:
        """Return the entries of JSON in the old words, sorted: files list keys by their names."""
        return "\n".join(sorted(re.split(r"[\s,]+|\\n", self.undone(text))))

    def move_keys(self, text: str) -> bool:
        """Say whether a text has a key that is called otherwise."""
        return any(re.search(rf"\b{new}\b", text) for new in self.inner_keys.values())

    def move_layout(self, before: str, after: str) -> bool:
        """Say whether a command of another length stands in one of two pages and not the other."""
        words = [new for _, new in self._command_words()]
        return any((word in before) != (word in after) for word in words)

    def _command_words(self) -> list[tuple[str, str]]:
        return [
            pair
            for old, new in self.commands.items()
            for pair in zip(old.split(), new.split(), strict=True)
            if pair[0] != pair[1]
        ]

    def _words(self) -> list[tuple[str, str]]:
        keys = {**self.recipe_keys, **self.inner_keys, **self.files}
        return [*self._command_words(), *keys.items()]
