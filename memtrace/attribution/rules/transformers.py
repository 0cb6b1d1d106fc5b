"""transformers, accelerate and peft. Source: transformers 5.17, accelerate 1.x, peft 0.2x, and recordings of them."""

from __future__ import annotations

from memtrace.attribution.rule import By, Rank, Rule
from memtrace.timeline.callsites import Function, names

_MODELS = Function("transformers/models/*/modeling_*.py", ("forward",))

RULES: tuple[Rule, ...] = (
    Rule(
        id="transformers.loss",
        category="act.logits",
        where=Function("transformers/loss/*.py"),
        by=By.LOGITS,
        note="The loss: upcast logits, log-softmax, the loss itself.",
    ),
    Rule(
        id="transformers.head",
        category="act.logits",
        where=_MODELS,
        child=(Function("torch/nn/modules/linear.py", ("forward",)),),
        outermost=True,
        by=By.LOGITS,
        note="A linear layer called by the outermost model: its head.",
    ),
    Rule(
        id="transformers.cache",
        category="kv_cache",
        where=Function("transformers/cache_utils.py"),
        knob="use_cache",
        note="Keys and values kept for the next token.",
    ),
    Rule(
        id="transformers.pretrained",
        category="param.full",
        where=Function(
            "transformers/modeling_utils.py",
            names("from_pretrained _load_pretrained_model _initialize_weights initialize_weights _init_weights"),
        ),
        rank=Rank.LAST,
        label="parameters being loaded",
        note="from_pretrained.",
    ),
    Rule(
        id="transformers.constructor",
        category="param.full",
        where=Function("transformers/models/*/modeling_*.py", ("__init__",)),
        rank=Rank.LAST,
        label="made by a model's constructor",
        note="A model made on the device: parameters that it makes itself, and its buffers.",
    ),
    Rule(
        id="transformers.trainer.inputs",
        category="input",
        where=Function("transformers/trainer.py", ("_prepare_input", "_prepare_inputs")),
        note="A batch moved to the device.",
    ),
    Rule(
        id="transformers.trainer.evaluation",
        category="act.logits",
        where=Function(
            "transformers/trainer.py", names("prediction_step evaluation_loop nested_gather gather_function")
        ),
        rank=Rank.LAST,
        label="outputs kept in evaluation",
        note="Losses and logits gathered over the evaluation.",
    ),
    Rule(
        id="transformers.trainer.loss",
        category="act.logits",
        where=Function(
            "transformers/trainer.py",
            names(
                "training_step _run_epoch _inner_training_loop compute_loss _maybe_log_save_evaluate "
                "get_batch_samples _get_num_items_in_batch"
            ),
        ),
        rank=Rank.LAST,
        by=By.LOGITS,
        label="losses summed up by the Trainer",
        note="The Trainer's own numbers: losses, counts of items.",
    ),
    Rule(
        id="transformers.generate",
        category="input",
        where=Function("transformers/generation/*.py"),
        rank=Rank.LAST,
        label="tokens and masks of generation",
        note="What generate itself makes: token ids, masks, positions, scores.",
    ),
    Rule(
        id="transformers.optimizer",
        category="optim.temp",
        where=Function("transformers/optimization.py", ("step",)),
        by=By.OPTIMIZER,
        rank=Rank.FALLBACK,
        note="An optimizer of transformers: what outlives the step is a state.",
    ),
    Rule(
        id="accelerate.inputs",
        category="input",
        where=Function("accelerate/utils/operations.py", ("send_to_device",)),
        note="A batch moved to the device.",
    ),
    Rule(
        id="accelerate.loader",
        category="input",
        where=Function("accelerate/data_loader.py"),
        rank=Rank.LAST,
        note="accelerate's data loader.",
    ),
    Rule(
        id="accelerate.outputs",
        category="act.logits",
        where=Function("accelerate/utils/operations.py", ("convert_to_fp32", "_convert_to_fp32")),
        by=By.LOGITS,
        label="outputs made fp32",
        knob="bf16, fp16",
        note="accelerate makes a prepared model's outputs fp32: a second copy of the logits, twice as large.",
    ),
    Rule(
        id="peft.adapter",
        category="param.full",
        where=Function("peft/tuners/*.py", ("cast_adapter_dtype", "_move_adapter_to_device_of_base_layer")),
        label="adapter parameters",
        note="peft casts or moves an adapter's parameters.",
    ),
    Rule(
        id="peft.layer",
        category="param.full",
        where=Function("peft/tuners/*/*.py", names("update_layer reset_lora_parameters __init__")),
        rank=Rank.FALLBACK,
        label="adapter parameters",
        note="peft makes an adapter's parameters.",
    ),
)
