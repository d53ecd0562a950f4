"""The delta rules, one module a family. Importing this package registers them all."""

from halp.bitcenter.rules import activation, arithmetic, linear, loss, shape  # noqa: F401
