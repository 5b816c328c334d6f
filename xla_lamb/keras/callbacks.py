"""A Keras callback that logs the trust ratios of `xla_lamb.keras.Lamb`, keeps their history and plots it."""

from __future__ import annotations

import os
import warnings

import keras

from xla_lamb.trust import TrustRatios, check_plot, plot


class TrustRatioLogger(keras.callbacks.Callback):
    """Logs trust ratios: at the end of each epoch, those of the last step.

    It adds ``trust_ratio_min``, ``trust_ratio_median`` and ``trust_ratio_max`` to the epoch's logs. Callbacks that come after it in
    the list see them: put it before ``TensorBoard`` (where they are ``epoch_trust_ratio_min``, ...), ``CSVLogger`` and callbacks that
    monitor them; the ``History`` that ``fit`` returns and the progress bar always come last. Of a skipped step they are NaN.

    Args:
      every: number of batches after which the history gets a table, besides those of each epoch's end; on JAX each costs a
        synchronisation. None: only at the end of each epoch.
      plot: path of a PNG of the history (`xla_lamb.trust.plot`), replaced at the end of each epoch. None: no picture.
      per_variable: also log each ratio, as ``trust_ratio/<variable path>``: to TensorBoard rather than to a progress bar.

    Attributes:
      history: list of `xla_lamb.trust.TrustRatios`, of the last call of ``fit``.
      steps: for each of them the optimizer's ``iterations``.

    Raises:
      TypeError: when training begins, if the optimizer is not `xla_lamb.keras.Lamb`, alone, in wrappers of `xla_lamb.minimize` or in a LossScaleOptimizer.
      ImportError, FileNotFoundError, ValueError: when training begins, if the picture cannot be drawn there.

    Example::

        logger = TrustRatioLogger(every=100, plot="trust.png")
        model.fit(x, y, callbacks=[logger, keras.callbacks.TensorBoard("logs")])
        print(logger.history[-1])
    """

    def __init__(self, every: int | None = None, plot: str | os.PathLike | None = None, per_variable: bool = False):
        super().__init__()
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"every must be a number of batches, 1 or more, or None, not {every!r}")
        self.every = every
        self.plot = plot
        self.per_variable = per_variable
        # Read by Keras: whether batches need not wait for this callback. Only if it does nothing after them.
        self.async_safe = every is None
        self.history: list[TrustRatios] = []
        self.steps: list[int] = []

    def on_train_begin(self, logs=None):
        if self.plot is not None:
            check_plot(self.plot)
        self.history, self.steps = [], []
        self._latest, self._epoch_start, self._batches = None, 0, 0
        if self._optimizer().record_trust_ratios():
            self.model.make_train_function(force=True)  # the one that fit has just made may be compiled without them

    def on_epoch_begin(self, epoch, logs=None):
        self._latest, self._epoch_start = None, self._batches

    def on_train_batch_end(self, batch, logs=None):
        if self.every is None:
            return
        # With steps_per_execution, batch is the last of several.
        before, self._batches = self._batches, self._epoch_start + batch + 1
        self._latest = self._record() if self._batches // self.every > before // self.every else None

    def on_epoch_end(self, epoch, logs=None):
        table = self._record() if self._latest is None else self._latest
        if logs is not None:
            logs.update({f"trust_ratio_{name}": value for name, value in table.summary().items()})
            if self.per_variable:
                logs.update({f"trust_ratio/{row.name}": row.ratio for row in table})
        if self.plot is not None:
            try:
                plot(self.history, self.plot, steps=self.steps)
            except OSError as error:  # a full disk is no reason to end the training
                warnings.warn(f"the picture of the trust ratios could not be written: {error}", stacklevel=2)

    def _record(self) -> TrustRatios:
        """Adds the table of the last step to the history."""
        optimizer = self._optimizer()
        self.history.append(optimizer.trust_ratios())
        self.steps.append(int(optimizer.iterations))
        return self.history[-1]

    def _optimizer(self):
        # On JAX, self.model brings the values of a running epoch back into the variables.
        optimizer = self.model.optimizer
        while inner := getattr(optimizer, "inner", None) or getattr(optimizer, "inner_optimizer", None):
            optimizer = inner
        if not hasattr(optimizer, "record_trust_ratios"):
            name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            raise TypeError(f"TrustRatioLogger needs a model compiled with xla_lamb.keras.Lamb, and cannot read trust ratios from {name}")
        return optimizer
