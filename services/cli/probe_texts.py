"""Reference texts by which versions of a model are compared: plain prose, arithmetic, a list, code."""

from __future__ import annotations

TEXTS = (
    "The harbour froze in the first week of January, and for nineteen days no ship came in. The people of the town "
    "walked out over the ice to the island, where they found that the lighthouse keeper had been living on potatoes",
    "Water boils at one hundred degrees Celsius at sea level. On a high mountain the pressure of the air is lower, so "
    "water boils at a lower temperature, and it takes longer to cook an egg",
    "To plant a tree, dig a hole that is twice as wide as the roots. Put the tree into the hole, fill it with earth, "
    "and press the earth down with your foot. Then give the tree plenty of water",
    "def area(width, height):\n    return width * height\n\n\n"
    "def perimeter(width, height):\n    return 2 * (width + height)",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, sixteen",
    "My grandmother kept her letters in a wooden box under the bed. After she died we opened the box and read them one "
    "by one at the kitchen table, and for the first time I understood why she had never gone back",
)
