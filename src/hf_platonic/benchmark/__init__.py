"""The paper's protocol as one command: suites as data, and a workbench that makes what a suite names."""

from __future__ import annotations

from .suites import Suite, load_suite, suite_names
from .workbench import TaskData, Workbench

__all__ = ["Suite", "TaskData", "Workbench", "load_suite", "suite_names"]
