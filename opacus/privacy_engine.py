"""PrivacyEngine: the front door. Validate, capture, sample, optimise, account."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from opacus import checkpoint
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.data_loader import DPDataLoader, sampling_generator
from opacus.distributed.agreement import agree_on_shards
from opacus.distributed.following import DataParallel
from opacus.distributed.records import share_of_records
from opacus.distributed.sharding import is_sharded_model
from opacus.errors import ConfigurationError
from opacus.grad_sample import (
    AbstractGradSampleHooks,
    AbstractGradSampleModule,
    RowsPerSample,
    wrap_model,
)
from opacus.grad_sample.book import Book
from opacus.grad_sample.capture import Capture
from opacus.grad_sample.instantiate import Instantiate
from opacus.grad_sample.tensor_axis import TensorAxis
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.optimizers.inner_step import guard_inner_step
from opacus.preconditions import TWO_PASSES, loader_findings, make_private_findings, mode_option_names
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.utils.isolation_request import IsolationRequest
from opacus.utils.resumable import Sampling
from opacus.utils.sample_rate import sample_rate_of
from opacus.validators import ModuleValidator
from opacus.validators.batch_norm import guard_frozen
from opacus.validators.errors import UnsupportedError, UnsupportedModuleError

__all__ = ["PrivacyEngine"]


class PrivacyEngine:
    """Makes a model, its optimizer and its data loader train with differential privacy.

    Args:
        accountant: name of the accountant that turns steps into epsilon, e.g. "prv", "rdp", "gdp".
        secure_mode: take noise from the operating system's cryptographic generator.

    A deep copy shares its accountant with the original, since a copied optimizer goes on recording there: either tells the epsilon of
    all steps.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randint(0, 2, (64,)))
        >>> model = nn.Linear(3, 2)
        >>> engine = PrivacyEngine(accountant="rdp")
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=torch.utils.data.DataLoader(data, batch_size=16),
        ...     noise_multiplier=1.0,
        ...     max_grad_norm=1.0,
        ... )
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        ...     _ = optimizer.step()
        >>> len(engine.accountant)
        4
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        self.accountant = create_accountant(mechanism=accountant)
        self.secure_mode = secure_mode
        self.secure_rng = None
        self.dataset: Any = None
        self.sampling: Sampling | None = None  # of the loader made last; for checkpoints

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivacyEngine:
        memo[id(self.accountant)] = self.accountant
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: nn.Module = nn.CrossEntropyLoss(),  # noqa: B008
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Attach everything a private run needs; afterwards train as usual with what is returned.

        Args:
            module: the model, its parameters on any number of devices.
            optimizer: over `module`'s parameters.
            criterion: the loss, for mode "ghost", which has to wrap it.
            data_loader: over a data set of known length.
            noise_multiplier: sigma: noise standard deviation over `max_grad_norm`.
            max_grad_norm: clipping norm C.
            batch_first: whether dimension 0 of the model's inputs is the batch (else dimension 1).
            loss_reduction: "mean" if the loss averages over samples, "sum" if it adds.
            poisson_sampling: replace the loader by one that draws every record independently, as the accountants assume.
                Without it the reported epsilon does not describe what the loader does.
            clipping: the clipping style.
            noise_generator: the noise's one stream, on any device; None follows `torch.manual_seed`.
            grad_sample_mode: how samples are clipped: "hooks" (per-sample gradients on `p.grad_sample`), "functorch" (the same, by
                functorch for every layer), "bk" (one backward, no per-sample gradients: the fastest), "ghost" (two backward
                passes of a wrapped criterion: the least memory), "ew", "no_op".
            wrap_model: return a wrapper around `module` (True), or hook it and return the hooks (False).
            rand_on_empty: see `DPDataLoader`.
            **kwargs: options of the clipping style's optimizer; `reduction_device`; and of the mode:
                `rows_per_sample` (k, default 1) and `row_order` ("blocked", "interleaved"; see `RowsPerSample`) where a sample owns k
                rows of what the model is given, as a preference pair does. An item of the data set is then still one sample (the
                collate function makes k rows of it), batch sizes and epsilon count samples, the k rows are clipped together, and
                `loss_reduction="mean"` is the mean over samples: over rows / k of them.
                `check_isolation=True` runs `opacus.testing.check_sample_isolation` first, on up to 16 records of the data set,
                and refuses a model or loss that lets one sample change another's gradient. The loss it checks is
                `isolation_loss(model, batch)`; without one `criterion(model(x), y)`, or `model(**batch).loss` for a mapping. It is a
                look at private records outside any accounted step: no data, but whether it passed, gets out.
                Without it a few training forwards are searched for layers that mix samples, not for such losses; of sharded models
                (FSDP2, tensor parallel) none are, and a warning says so: check those before they are sharded.
                `allow_shared_devices=True` lets several processes use one accelerator.

        Where several processes train (a model in `DifferentiallyPrivateDistributedDataParallel` or torch's
        `DistributedDataParallel`, or without wrapper where `torch.distributed` has several ranks), every rank calls this, before or
        after wrapping. The loader's batch size is that of all ranks together (under a `DistributedSampler`: of one rank); each rank
        gets its share. Ranks compare replicas and arguments first, and an unwrapped model takes over the first rank's parameters.

        Returns:
            `(module or hooks, optimizer, data_loader)`; in mode "ghost" `(module or hooks, optimizer, criterion, data_loader)`.

        Raises:
            ConfigurationError: listing everything that keeps the run from being private; nothing was changed. Over several
                processes a ReplicaError with all ranks' problems, on every rank.
            RankLostError: naming ranks that did not call this within the process group's timeout.
            UnsupportedModuleError: where layers that cannot be trained privately are all there is to mend.

        Formal guarantee:
            Each step of the returned optimizer on a batch of the returned loader is a Poisson-subsampled Gaussian mechanism
            (sampling rate 1 / batches per epoch, noise multiplier `noise_multiplier`), and is recorded by the accountant
            exactly once. The guarantee is for adding or removing one record.
        """
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        if isinstance(noise_multiplier, torch.Tensor) and noise_multiplier.dim() == 0:
            noise_multiplier = noise_multiplier.item()
        inner = module._module if isinstance(module, AbstractGradSampleModule) else module
        mode_options = {
            name: kwargs.pop(name) for name in mode_option_names(grad_sample_mode) if name in kwargs
        }
        isolation = IsolationRequest(
            kwargs.pop("check_isolation", False), kwargs.pop("isolation_loss", None), criterion
        )
        allow_shared_devices = kwargs.pop("allow_shared_devices", False)
        parallel = DataParallel.of(module)
        problems, layer_errors = make_private_findings(
            module=module,
            criterion=criterion,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            clipping=clipping,
            noise_generator=noise_generator,
            secure_mode=self.secure_mode,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            options=kwargs,
            mode_options=mode_options,
            distributed=parallel is not None,
        )
        problems += isolation.problems(module)
        found = problems + [str(error) for error in layer_errors]
        settings = {
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
            "loss_reduction": loss_reduction,
            "clipping": clipping,
            "grad_sample_mode": grad_sample_mode,
            "secure_mode": self.secure_mode,
            **{
                k: v for k, v in {**kwargs, **mode_options}.items() if k != "reduction_device"
            },  # a rank's own
        }
        if parallel is not None:
            parallel.agree(
                module,
                data_loader=data_loader,
                poisson_sampling=poisson_sampling,
                noise_generator=noise_generator,
                allow_shared_devices=allow_shared_devices,
                settings=settings,
                problems=found,
            )
        elif isinstance(inner, nn.Module) and is_sharded_model(inner):
            agree_on_shards(
                inner,
                optimizer,
                model_axes=TensorAxis(inner).names,
                data_loader=data_loader,
                poisson_sampling=poisson_sampling,
                settings=settings,
                problems=found,
            )
        _raise_findings("make_private cannot start", problems, layer_errors)
        if parallel is not None:
            parallel.start(inner)

        rows = RowsPerSample(mode_options.pop("rows_per_sample", 1), mode_options.pop("row_order", "blocked"))
        isolation.check(module, data_loader, rows, loss_reduction, batch_first)
        sample_rate = sample_rate_of(data_loader)
        private_loader = (
            DPDataLoader.from_data_loader(
                data_loader,
                batch_first=batch_first,
                rand_on_empty=rand_on_empty,
                **(
                    share_of_records(inner, sampling_generator(data_loader))
                    if parallel is None
                    else {"distributed": True, "process_group": parallel.group}
                ),
            )
            if poisson_sampling
            else data_loader
        )
        records = len(data_loader.dataset)  # type: ignore[arg-type]
        expected_batch_size: float = max(1, int(records * sample_rate + 1e-6))
        if parallel is not None:
            expected_batch_size /= parallel.n_replicas
            kwargs["process_group"] = parallel.group
        private_optimizer = get_optimizer_class(clipping, parallel is not None, grad_sample_mode)(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,  # type: ignore[arg-type]
            expected_batch_size=expected_batch_size,  # type: ignore[arg-type]
            loss_reduction=loss_reduction,
            generator=noise_generator,
            secure_mode=self.secure_mode,
            **kwargs,
        )
        private_optimizer.param_names = {id(p): name for name, p in inner.named_parameters()}
        if grad_sample_mode in TWO_PASSES:
            mode_options["max_grad_norm"] = private_optimizer.max_grad_norm
        private_module = self._prepare_model(
            module, batch_first, loss_reduction, grad_sample_mode, wrap_model, mode_options
        )
        if rows.count > 1:
            private_module.set_owners(rows)
        book = getattr(private_module, "policy", None)
        if isinstance(book, Book):
            private_optimizer.attach_book(book)
        if isinstance(
            book, Instantiate
        ):  # a wrapper shows its model's attributes too, whose `policy` may be anything
            private_optimizer.batches = book.batches
        if poisson_sampling:
            private_module.forbid_grad_accumulation()
        if parallel is not None:
            parallel.follow_later_wrapping(private_module, inner)
        private_optimizer.made_for_one_process = parallel is None and not is_sharded_model(inner)
        guard_frozen(inner)
        private_optimizer.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=sample_rate))
        if self.dataset is not None and self.dataset is not data_loader.dataset:
            warnings.warn(
                "this PrivacyEngine has made a loader of another data set private before: its epsilon adds up over both, as if the "
                "same people were in them. Use an engine for each data set whose people differ.",
                stacklevel=2,
            )
        self.dataset = data_loader.dataset
        self.sampling = Sampling.of(private_loader)
        capture = getattr(private_module, "capture", None)
        if isinstance(capture, Capture):
            guard_inner_step(private_optimizer, lambda: capture.attached and capture.enabled)
        if grad_sample_mode in TWO_PASSES:
            private_criterion = DPLossFastGradientClipping(
                private_module, private_optimizer, criterion, loss_reduction
            )
            return private_module, private_optimizer, private_criterion, private_loader
        return private_module, private_optimizer, private_loader

    def _prepare_model(
        self,
        module: nn.Module,
        batch_first: bool,
        loss_reduction: str,
        grad_sample_mode: str,
        wrap: bool,
        options: dict[str, Any],
    ) -> Any:
        if isinstance(module, AbstractGradSampleModule):
            return module
        return wrap_model(
            module, grad_sample_mode, wrap, batch_first=batch_first, loss_reduction=loss_reduction, **options
        )

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: nn.Module = nn.CrossEntropyLoss(),  # noqa: B008
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        **kwargs: Any,
    ) -> Any:
        """`make_private` with the noise multiplier that spends `target_epsilon` over `epochs`.

        Args:
            target_epsilon: epsilon after `epochs` epochs, at `target_delta`.
            target_delta: delta, below one over the number of records.
            epochs: how many epochs will be trained.
            module, optimizer, criterion, data_loader, max_grad_norm, batch_first, loss_reduction, poisson_sampling, clipping,
                noise_generator, grad_sample_mode, wrap_model, **kwargs: as in `make_private`.

        Returns:
            What `make_private` returns.

        Raises:
            ConfigurationError: as `make_private`, or if no noise multiplier reaches the target.

        Formal guarantee:
            After `epochs` epochs with the returned loader the accountant's epsilon at `target_delta` is at most
            `target_epsilon`, provided it had recorded nothing before.
        """
        _raise_findings("make_private_with_epsilon cannot start", loader_findings(data_loader), [])
        if len(self.accountant) > 0:
            warnings.warn(
                f"the accountant has recorded {len(self.accountant)} steps already; the noise multiplier is chosen as if "
                "it had not, so the total will exceed target_epsilon. Use a new PrivacyEngine for a new budget.",
                stacklevel=2,
            )
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate_of(data_loader),
            epochs=epochs,
            accountant=self.accountant.mechanism(),
            epsilon_tolerance=0.002,  # what is not spent is noise for nothing
        )
        return self.make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            **kwargs,
        )

    def get_epsilon(self, delta: float) -> float:
        """Epsilon spent so far, at `delta`.

        Args:
            delta: between 0 and 1, below one over the number of records.
        """
        return self.accountant.get_epsilon(delta)

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | BinaryIO,
        module: AbstractGradSampleModule | AbstractGradSampleHooks,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Write all that a resumed run needs: see `load_checkpoint` for what it promises.

        The file is complete or the previous one: it is written under another name, read back, and renamed.

        Of a sharded model (FSDP2, HSDP, tensor parallel) every rank calls this with one path, which becomes a folder: each rank
        writes its shards there, with `torch.distributed.checkpoint`. It too is complete or the previous one.

        Args:
            path: where to; in a file object's case everything comes in one `write`. For a sharded model a folder that all ranks see.
            module: the model, wrapped or plain, or its hooks.
            optimizer: the private optimizer: the inner optimizer's state, noise multiplier, clipping norms, and the noise's stream.
            noise_scheduler, grad_clip_scheduler: schedules whose state is saved too.
            checkpoint_dict: anything of your own, e.g. `{"epoch": 3}` or a learning-rate scheduler's state dict: tensors and
                plain Python values. It is not changed.
            module_state_dict_kwargs: passed on to `module.state_dict`.
            torch_save_kwargs: passed on to `torch.save`.

        Raises:
            CheckpointError: naming what could not be loaded again. No file was changed.

        Warns:
            UserWarning: within a logical batch (a skipped step), whose gradients so far are not saved.

        Formal guarantee:
            None for the file: it holds the state of the noise's generator, from which noise can be computed and taken off. Keep
            it as secret as the data, and release the weights alone.
        """
        checkpoint.save(
            self,
            path=path,
            module=module,
            optimizer=optimizer,
            schedulers={"noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler},
            checkpoint_dict=checkpoint_dict,
            module_state_dict_kwargs=module_state_dict_kwargs,
            torch_save_kwargs=torch_save_kwargs,
        )

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | BinaryIO,
        module: AbstractGradSampleModule | AbstractGradSampleHooks,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Go on where `save_checkpoint` was called; first make everything private as for the run that was saved.

        On the same devices the resumed run computes the parameters of an uninterrupted one, bit for bit, and its epsilon: the
        noise, the batches and torch's default generators (dropout) continue. Saved within an epoch, the loader's next pass yields
        the rest of that epoch; bit for bit if it has no workers. (With workers, or without Poisson sampling, an epoch
        begins anew.) On another number of devices of the same type noise and batches are the same, dropout and rounding need
        not be. On another type of device new streams are seeded from the saved ones. Generators of Python and NumPy, and those in
        workers, are not saved.

        A sharded run goes on in the same way on as many ranks. On another number of ranks, or another mesh, weights, optimizer state
        and epsilon are the same, and each rank reads its part; noise, batches and dropout come from new streams. The noise's are
        seeded by numbers counted on from those of all layouts that led to the checkpoint, so none of its noise is drawn again.

        Args:
            path: what `save_checkpoint`, here or of Opacus 1.6.0, wrote; every rank of a sharded run passes the same.
            module: the model, wrapped or plain, or its hooks.
            optimizer: the private optimizer; its noise multiplier and clipping norms become the saved ones.
            noise_scheduler, grad_clip_scheduler: schedules to go on with.
            module_load_dict_kwargs: passed on to `module.load_state_dict`.
            torch_load_kwargs: passed on to `torch.load`; `weights_only` is always True.

        Returns:
            What was passed as `checkpoint_dict`, with `"module_state_dict"` and `"privacy_accountant_state_dict"`.

        Raises:
            CheckpointError: listing all that is missing, of another mechanism, of another shape, damaged or not to be trusted.
                Nothing was changed.

        Formal guarantee:
            No code in the file is executed. Epsilon counts each step of the run that led to the checkpoint, and each step from now
            on. Steps of a crashed run after its last checkpoint are computed again, not added: whatever came out of
            them must not be used unless the resumed run repeats them bit for bit.
        """
        return checkpoint.load(
            self,
            path=path,
            module=module,
            optimizer=optimizer,
            schedulers={"noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler},
            module_load_dict_kwargs=module_load_dict_kwargs,
            torch_load_kwargs=torch_load_kwargs,
        )

    def is_compatible(
        self, *, module: nn.Module, optimizer: Optimizer | None, data_loader: DataLoader | None
    ) -> bool:
        """Whether `validate` finds nothing.

        Args:
            module: the model. optimizer: its optimizer, or None. data_loader: the loader, or None.
        """
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except (UnsupportedError, ConfigurationError):
            return False
        return True

    def validate(
        self, *, module: nn.Module, optimizer: Optimizer | None, data_loader: DataLoader | None
    ) -> None:
        """Check that the parts can be made private.

        Args:
            module: the model. optimizer: its optimizer, or None. data_loader: the loader, or None.

        Raises:
            UnsupportedModuleError: naming each layer that cannot be trained privately.
            ConfigurationError: naming what is wrong with the loader.
        """
        problems = loader_findings(data_loader) if data_loader is not None else []
        _raise_findings("training cannot be made private", problems, ModuleValidator.layer_errors(module))

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of `module` with layers that cannot be trained privately replaced, weights kept.

        Args:
            module: the model.

        Raises:
            UnsupportedModuleError: if a layer has no replacement.
        """
        return ModuleValidator.fix_and_validate(module)


def _raise_findings(heading: str, problems: list[str], layer_errors: list[UnsupportedModuleError]) -> None:
    if layer_errors and not problems:
        raise UnsupportedModuleError(layer_errors)
    if problems:
        raise ConfigurationError(heading, problems + [str(error) for error in layer_errors])
