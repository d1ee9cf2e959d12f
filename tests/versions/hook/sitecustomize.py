"""Runs at the start of every Python process of a mixed mesh: puts the release that the process is to run on its path.

A service's children get the path directly, so that a worker is of one release as a whole. The supervisor's do not:
each looks up its own.
"""

import json
import os
import sys

_words = sys.orig_argv
_name = _words[_words.index("--instance") + 1] if "--instance" in _words else ""
with open(os.environ["RELEASES_OF_PROCESSES"], encoding="utf-8") as _file:
    _trees = json.load(_file)
_tree = _trees.get(_name, _trees["*"])
_path = [_tree, f"{_tree}/protos"]
sys.path[:0] = _path
if _name:
    os.environ["PYTHONPATH"] = os.pathsep.join(_path)
