"""A wrong command line, file or configuration exits with 2 before anything is compiled, and says what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import train
from configs import PRESETS
from mesh.distributed import Start
from moex.cli import load, parse

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch, run_folder):
    """No test of this file may come as far as the program, or as compiling anything."""
    fail = lambda *args, **kwargs: pytest.fail("a wrong configuration reached the program")
    monkeypatch.setattr("moex.trainer.build", fail)
    monkeypatch.setattr("mesh.distributed.initialise", lambda: Start("one process", None, 1, 0))
    compiled = []
    listen = lambda event, duration, **kwargs: compiled.append(event) if "compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    assert not [path for path in run_folder.iterdir() if path.suffix != ".json"]


def refused(capsys, arguments) -> str:
    """Runs a command line that must exit with 2, without a traceback; returns what it says."""
    try:
        code = train.main(arguments)
    except SystemExit as error:
        code = error.code
    out = capsys.readouterr()
    assert code == 2, out
    assert not out.out.strip() or "process" in out.out
    assert "Traceback" not in out.err
    return " ".join(out.err.replace("│", " ").split())


FLAGS = {
    "--train.stepz=3": ["unknown option --train.stepz", "did you mean --train.steps"],
    "--optimizer.steps 3": ["unknown option --optimizer.steps", "did you mean --train.steps?"],
    "--learning_rate 3": ["unknown option --learning_rate"],
    "--peak_lr=1": ["did you mean --optimizer.peak_lr?"],
    "--optimizer.weigth_decay .1": ["did you mean --optimizer.weight_decay?"],
    "--model.top_kk=2": ["did you mean --model.router.top_k?"],
    "--model.router.num-expert=2": ["did you mean --model.router.num_experts?"],
    "--model 3": ["unknown option --model"],
    "--train.steps abc": ["--train.steps", "'abc'"],
    "--train.steps 1.5": ["--train.steps", "'1.5'"],
    "--train.steps": ["--train.steps", "Expected 1"],
    "--optimizer.peak-lr fast": ["--optimizer.peak-lr", "'fast'"],
    "--precision.compute-dtype float8": ["float8", "--precision.compute-dtype", "'float32', 'bfloat16'"],
    "--memory.recompute foo": ["foo", "--memory.recompute", "'layer'"],
    "--model.tie-embeddings maybe": ["maybe", "--model.tie-embeddings"],
    "surplus": ["surplus"],
}


@pytest.mark.parametrize("flags", FLAGS)
def test_wrong_flag(capsys, flags):
    error = refused(capsys, ["tiny", *flags.split()])
    assert all(part in error for part in FLAGS[flags]), error


def test_unknown_preset(capsys):
    error = refused(capsys, ["tinny"])
    assert "no preset 'tinny'; did you mean tiny?" in error
    assert all(name in error for name in PRESETS)
    assert "no preset 'zzz'." in refused(capsys, ["zzz"])


def test_preset_and_file(capsys):
    assert "give a preset (tiny) or --config run.json, not both" in refused(capsys, ["tiny", "--config", "run.json"])


@pytest.mark.parametrize("arguments", [["--config"], ["--config="], ["--config", "--train.steps=3"]])
def test_config_without_path(capsys, arguments):
    assert "--config needs the path of a JSON file" in refused(capsys, arguments)


FILES = {
    '{"model": {"router": {"top_kk": 2}}}': ["unknown option --model.router.top_kk", "--model.router.top_k?"],
    '{"learning_rate": 0.1}': ["unknown option --learning_rate"],
    '{"optimizer": {"steps": 3}}': ["did you mean --train.steps?"],
    '{"model": {"d_model": "8x"}}': ["--model.d-model", "'8x'"],
    '{"model": {"d_model": null}}': ["--model.d-model", "'None'"],
    '{"model": 3}': ["unknown option --model"],
    '{"model": ': ["holds no JSON object"],
    "[1]": ["holds no JSON object: a list"],
}


@pytest.mark.parametrize("text", FILES)
def test_wrong_file(capsys, run_folder, text):
    (run_folder / "run.json").write_text(text)
    error = refused(capsys, ["--config", "run.json"])
    assert "--config run.json" in error
    assert all(part in error for part in FILES[text]), error


def test_missing_file(capsys):
    assert "--config away.json: No such file" in refused(capsys, ["--config", "away.json"])


# What is wrong, and what the message must hold: field, numbers, remedy. Eight devices.
CONFIGURATIONS = {
    "--parallel.ep=4 --parallel.transport=alltoall --model.router.num-experts=6": [
        "model.router.num_experts=6", "parallel.ep=4", "choose a divisor of 6"],
    "--parallel.dp=3": ["dp=3", "3 devices", "there are 8", "set parallel.dp to 0"],
    "--parallel.tp=3": ["tp=3", "doesn't divide the 8 devices"],
    "--parallel.edp=2 --parallel.ep=2 --parallel.transport=alltoall": ["edp=2", "4 devices", "there are 8"],
    "--parallel.tp=0": ["at least 1", "'tp': 0"],
    "--parallel.pp=2": ["8 rows are 1 micro-batches", "parallel.pp=2 ranks leave 1 over", "a multiple of 2"],
    "--parallel.pp=2 --train.accumulation=2 --train.ramp-sizes 4 --train.ramp-samples 8": ["4 rows are 1 micro-batches"],
    "--parallel.pp=8 --train.accumulation=8": ["parallel.pp=8", "4 layers don't fill 8 x 1 = 8 stages"],
    "--parallel.pp=2 --parallel.layout=Ett|tL --train.accumulation=2": ["layout 'Ett|tL'", "E, 4 t, 0 m and L"],
    "--parallel.pp=2 --train.accumulation=2 --optimizer.qk-clip=50": ["optimizer.qk_clip=50.0 reads attention's logits"],
    "--parallel.overlap True": ["parallel.overlap has no effect without rows that travel"],
    "--parallel.overlap True --parallel.ep=2 --parallel.transport=alltoall": ["no effect with train.accumulation=1"],
    "--parallel.overlap True --parallel.ep=2 --parallel.transport=ragged": ["transport ragged waits", "use allgather or"],
    "--parallel.overlap True --parallel.ep=2 --parallel.transport=alltoall --train.accumulation=2 --memory.recompute layer "
    "--parallel.waves=2 --precision.wire=both": [
        "memory.recompute=layer", "attention and experts", "parallel.waves=2 runs without", "precision.wire=both runs"],
    "--parallel.overlap True --parallel.ep=2 --parallel.transport=alltoall --train.accumulation=2 --memory.stash experts": [
        "memory.stash=experts", "use memory.recompute"],
    "--parallel.overlap True --parallel.ep=2 --parallel.transport=alltoall --train.accumulation=2 "
    "--parallel.echo-slots=1": ["parallel.echo_slots=1 runs without parallel.overlap only"],
    "--parallel.virtual-pp=2": ["parallel.virtual_pp=2 has no effect with parallel.pp=1"],
    "--parallel.layout=EttttL": ["parallel.layout='EttttL' has no effect with parallel.pp=1"],
    "--parallel.pp=2 --train.accumulation=2 --memory.stash experts": ["memory.stash=experts", "use memory.recompute"],
    "--parallel.pp=2 --train.accumulation=2 --precision.recipe=fp8_tensor --observe.measure-precision-every=1": [
        "observe.measure_precision_every=1", "set it to 0"],
    "--parallel.pp=4 --train.accumulation=4 --model.vocab-multiple=2 --model.vocab-size=258": [
        "padded vocabulary", "tp x pp", "4"],
    "--parallel.ep=2": ["parallel.transport=local", "parallel.ep=2", "alltoall or allgather"],
    "--parallel.transport=alltoall": ["parallel.transport=alltoall", "parallel.ep=1", "set it to local"],
    "--parallel.ep=2 --parallel.transport=ragged": ["parallel.transport=ragged", "use alltoall or allgather"],
    "--parallel.context=ring": ["parallel.context=ring has no effect with parallel.cp=1", "set it to gather"],
    "--parallel.deal=document": ["parallel.deal=document has no effect with parallel.cp=1", "set it to row"],
    "--parallel.cp-groups 2 1 4 --parallel.cp=4 --train.accumulation=2": [
        "parallel.cp_groups=2 1 4 must rise", "train.accumulation=2 micro-batches don't divide into 3 shares",
        "parallel.context must be ring, not gather", "data.packing must be documents, not windows"],
    "--parallel.ulysses=2": ["parallel.ulysses=2 has no effect with parallel.context=gather"],
    "--parallel.context=hierarchical": ["parallel.ulysses=1 with parallel.context=hierarchical is ring", "at least 2"],
    "--parallel.cp=4 --parallel.context=hierarchical --parallel.ulysses=4": [
        "2 key-value heads", "parallel.ulysses=4: use ring or gather", "choose a divisor between the two"],
    "--parallel.ep=2 --parallel.transport=alltoall --parallel.spill-factor=0.5": [
        "parallel.spill_factor=0.5 has no effect with cell_factor=0"],
    "--parallel.echo-slots=1": ["parallel.echo_slots=1 has no effect with parallel.ep=1"],
    "--parallel.ep=2 --parallel.transport=alltoall --parallel.echo-slots=1 --model.router.capacity-factor=1": [
        "parallel.echo_slots=1 clones hot experts", "capacity_factor=1.0 drops", "use one of the two"],
    "--parallel.rungs=1": ["parallel.rungs=1 must lie between 2", "and 8"],
    "--parallel.rungs=5": ["parallel.rungs=5 has no effect without cell_factor, row_factor or a stash"],
    "--parallel.tail=0.1": ["parallel.tail=0.1 has no effect without cell_factor, row_factor or a stash"],
    "--parallel.tail=1 --parallel.row-factor=2": ["parallel.tail=1.0", "below 1"],
    "--parallel.waves=0": ["parallel.waves=0 must be at least 1"],
    "--parallel.waves=7": ["tokens of a device in a micro-batch=256", "parallel.waves=7"],
    "--parallel.waves=2 --model.router.capacity-factor=1 --model.router.pad-to-capacity True": [
        "parallel.waves=2", "leave out pad_to_capacity"],
    "--parallel.echo=report": ["parallel.echo=report has no effect with echo_slots=0"],
    "--parallel.ep=2 --parallel.transport=alltoall --parallel.echo-slots=1 --parallel.echo=retry": [
        "parallel.echo=retry has no effect without cell_factor or row_factor"],
    "--parallel.ep=2 --parallel.transport=alltoall --parallel.echo-slots=1 --parallel.echo-wire=float8 "
    "--model.expert-width=64": ["parallel.echo_wire=float8", "expert_width / etp=64 must be multiples of 128"],
    "--memory.stash experts --memory.recompute experts": ["`experts` are in stash and in recompute"],
    "--memory.stash experts --model.num-dense-layers=4": ["memory.stash has no effect without MoE layers"],
    "--memory.stash experts --parallel.waves=2": ["memory.stash has no effect on parallel.waves"],
    "--memory.stash experts --memory.stash-factor=0.5": ["memory.stash_factor=0.5", "at least 1"],
    "--memory.stash-factor=2": ["memory.stash_factor=2.0 has no effect without memory.stash"],
    "--parallel.echo-hot=5": ["parallel.echo_hot=5 has no effect with echo_slots=0"],
    "--parallel.row-factor=inf": ["parallel.row_factor=inf must be finite"],
    "--parallel.row-factor=nan": ["parallel.row_factor=nan must be finite"],
    "--model.router.quantile-decay=0.5": ["quantile_decay=0.5 has no effect without selection=quantile"],
    "--model.router.capacity-policy=position": ["capacity_policy=position has no effect without capacity_factor"],
    "--model.router.group-score-top=3": ["group_score_top=3 has no effect without num_groups above 1"],
    "--model.router.scaling-factor=1e39": ["model.router.scaling_factor=1e+39 must be above 0 and finite"],
    "--train.run-ahead=0": ["train.run_ahead=0 must be at least 1"],
    "--model.router.selection=sinkhorn": ["model.router.selection=sinkhorn", "['aux_coefficient']", "set them to 0"],
    "--model.router.selection=quantile --model.router.aux-coefficient=0 --model.router.bias-rate=0.1": [
        "model.router.bias_rate=0.1 has no effect with selection=quantile"],
    "--model.router.bias-centred True": ["model.router.bias_centred has no effect with bias_rate=0"],
    "--model.router.pad-to-capacity True": ["model.router.pad_to_capacity needs a capacity"],
    "--model.router.jitter=1": ["model.router.jitter=1.0", "below 1"],
    "--model.router.forced=skew --model.router.jitter=0.1": ["model.router.jitter=0.1 has no effect on forced=skew"],
    "--model.router.capacity-factor=-1": ["model.router.capacity_factor=-1.0 must be at least 0"],
    "--parallel.cell-factor=1.5": ["parallel.cell_factor=1.5 has no effect with transport local"],
    "--model.router.top-k=9": ["top_k=9", "num_experts=8"],
    "--model.router.num-groups=3": ["num_experts=8", "num_groups=3"],
    "--model.router.top-k=1": ["top_k=1", "set model.router.renormalize to False"],
    "--train.batch-size=10 --train.accumulation=4": ["train.batch_size=10", "train.accumulation=4"],
    "--train.batch-size=12 --train.accumulation=2": [
        "train.batch_size / train.accumulation=6", "dp=8", "choose a multiple of 8"],
    "--train.seq-len=100 --parallel.cp=4 --parallel.tp=2": ["train.seq_len=100", "cp x tp=8", "a multiple of 8"],
    "--train.seq-len=100 --parallel.cp=8": ["train.seq_len=100", "2 x cp=16"],
    "--model.attention.num-heads=6 --model.attention.num-kv-heads=6 --parallel.tp=4": [
        "model.attention.num_heads=6", "tp=4"],
    "--model.attention.num-heads=12 --model.attention.num-kv-heads=3 --parallel.tp=4": [
        "model.attention.num_kv_heads=3", "tp=4", "change parallel.tp"],
    "--model.attention.num-heads=3": ["model.attention.num_heads=3", "num_kv_heads=2"],
    "--model.vocab-size=300 --model.vocab-multiple=4 --parallel.tp=8": ["padded vocabulary=300", "tp=8"],
    "--model.expert-width=20 --parallel.etp=8": ["model.expert_width=20", "etp=8"],
    "--model.vocab-size=100": ["model.vocab_size=100", "at least 256"],
    "--model.attention.head-dim=5": ["rotated width 5 must be even"],
    "--model.attention.kind=mla": ["model.attention.kind=mla needs", "kv_latent_dim"],
    "--model.attention.value-dim=8": ["['value_dim'] have no effect with kind=gqa", "set them to 0 or kind to mla"],
    "--model.attention.rope-dim=128": ["rope_dim=128", "head_dim=64"],
    "--model.attention.window-pattern 1 0": ["window_pattern=(1, 0) has no effect with sliding_window=0"],
    "--model.attention.qk-norm=False --model.attention.qk-norm-joint=True": ["qk_norm_joint", "without qk_norm"],
    "--model.attention.rope.truncate=False": ["['truncate'] have no effect with factor=1"],
    "--model.num-dense-layers=4 --model.shared-width=8": ["shared_width=8", "without MoE layers", "set them to 0"],
    "--model.shared-gate=True": ["model.shared_gate has no effect with shared_width=0"],
    "--model.swiglu-alpha=1": ["swiglu_alpha=1", "swiglu_limit=0"],
    "--model.mtp-coefficient=1": ["mtp_coefficient=1", "mtp_depth=0"],
    "--model.moe-every=0": ["model.moe_every=0 must be at least 1"],
    "--model.expert-bias=True --precision.experts=fp8_block": ["knows no biases", "set it to compute"],
    "--memory.recompute mlp": ["memory.recompute", "`mlp` has no effect without dense layers"],
    "--memory.recompute layer moe": ["`layer` contains ['moe']", "name one or the others"],
    "--memory.recompute attention qkv": ["`attention` contains ['qkv']", "name one or the others"],
    "--memory.recompute mla_up_proj": ["`mla_up_proj` has no effect without attention.kind=mla", "name qkv"],
    "--memory.offload mlp_fc1 shared_experts": ["`mlp_fc1` has no effect without dense", "`shared_experts` has no effect"],
    "--memory.offload context": ["`context` has no effect without parallel.cp above 1"],
    "--memory.offload qkv --memory.recompute qkv": ["['qkv'] are in recompute and in offload"],
    "--memory.recompute layer_input": ["`layer_input` is what a layer is computed again from"],
    "--memory.offload qkv --parallel.pp=2 --train.accumulation=2": ["memory.offload=qkv", "use memory.recompute"],
    "--memory.offload expert_rows --parallel.waves=2": ["`expert_rows` has no effect on parallel.waves"],
    "--memory.offload expert_rows --memory.stash experts": ["['expert_rows'] are in the stash already"],
    "--memory.optimizer host --optimizer.name=sgd": ["memory.optimizer=host has no effect", "sgd_momentum"],
    "--optimizer.name=sgd": ["optimizer.weight_decay=0.1 has no effect with sgd", "set it to 0"],
    "--optimizer.warmup-steps=400": ["optimizer.warmup_steps=400", "train.steps=400"],
    "--optimizer.peak-lr=nan": ["optimizer.peak_lr=nan must be above 0"],
    "--optimizer.peak-lr=-1": ["optimizer.peak_lr=-1.0 must be above 0"],
    "--optimizer.clip-norm=-1": ["optimizer.clip_norm=-1.0 must be at least 0"],
    "--optimizer.beta2=1": ["optimizer.beta2=1.0", "below 1"],
    "--model.router.aux-coefficient=-1": ["model.router.aux_coefficient=-1.0 must be at least 0"],
    "--train.steps=0": ["train.steps=0 must be at least 1"],
    "--train.seed=-1": ["train.seed=-1", "4294967295"],
    "--train.seq-len=1": ["train.seq_len=1 must be at least 2"],
    "--train.batch-size=1000000": ["data:", "windows", "lower rows, accumulation or seq_len"],
    "--checkpoint.keep=0": ["checkpoint.keep must be at least 1"],
    "--train.ramp-sizes 4 --train.ramp-samples 8": ["train.ramp_sizes: [4]", "batch_size / accumulation = 8 rows"],
    "--train.ramp-sizes 16 --train.ramp-samples 8": ["train.ramp_sizes, ramp_samples, batch_size", "[16, 8] must rise"],
    "--train.ramp-sizes 4": ["1 batch sizes and 0 numbers of samples"],
    "--optimizer.schedule=wsd --optimizer.cooldown-steps=390": [
        "warmup_steps=30 and the cooldown of 390 steps don't fit into train.steps=400"],
    "--optimizer.cooldown-steps=5": ["optimizer.cooldown_steps=5 has no effect with schedule=cosine"],
    "--optimizer.schedule=constant --optimizer.schedule-steps=50": [
        "optimizer.schedule_steps=50 has no effect with schedule=constant"],
    "--optimizer.schedule-steps=20": ["optimizer.warmup_steps=30", "optimizer.schedule_steps=20"],
    "--optimizer.ema-decay=1": ["optimizer.ema_decay=1.0 must be at least 0 and below 1"],
    "--optimizer.moments=bfloat16 --optimizer.beta2=0.999": ["optimizer.moments=bfloat16", "beta2 of at most 0.995"],
    "--optimizer.name=sgd --optimizer.weight-decay=0 --optimizer.moments=bfloat16": ["no effect with sgd without momentum"],
    "--optimizer.lr-scales embedding": ["optimizer.lr_scales", "'embedding' must be PATTERN=FACTOR"],
    "--optimizer.freeze *.expert.*": ["no parameter matches '*.expert.*'", "moe_layers.moe.experts.down"],
    "--data.corpus nowhere": ["data: nowhere has no index.json", "python -m moex.data tokenize"],
    "--data.corpus stdlib stdlib": ["data.corpus=['stdlib', 'stdlib']", "none twice"],
    "--data.weights 1": ["data.weights has no effect with one corpus"],
    "--data.corpus a b --data.weights 1": ["data.weights has 1 numbers for 2 corpora"],
    "--data.max-epochs=0.001": ["data.max_epochs=0.001", "times through stdlib", "lower train.steps"],
    "--observe.profile=5": ["observe.profile: '5' must be FIRST:STOP"],
    "--profile 500:600": ["observe.profile=500:600 begins after train.steps=400"],
    "--inspect-batch x": ["--inspect-batch x must be the number of a step"],
    "--observe.log-every=0": ["observe.log_every=0 must be at least 1"],
    "--precision=fp8_block --precision.experts=fp8_block": ["precision.experts=fp8_block is precision.recipe already"],
    "--precision.mlp=mxfp8": ["precision.mlp=mxfp8 has no effect: the model has no such products"],
    "--precision.wire=both": ["precision.wire=both has no effect with transport local: no row travels"],
    "--precision.wire=both --parallel.ep=8 --parallel.transport=alltoall --model.d-model=192": [
        "precision.wire=both has a scale for 128 numbers", "model.d_model=192"],
    "--precision.gather=codes": ["precision.gather=codes has no effect without a recipe"],
    "--precision=mxfp8 --precision.gather=codes": ["gather=codes: mxfp8 needs a weight's codes along both dims"],
    "--precision=fp8_block --precision.high-first=1 --parallel.pp=2": ["high_last need parallel.zero=3 with pp above 1"],
    "--precision=fp8_block --precision.high-first=3 --precision.high-last=3": ["together at most model.num_layers=4"],
    "--precision=fp8_block --precision.attention=compute --precision.experts=compute": [
        "precision.recipe=fp8_block has no effect: each kind of product has one of its own"],
    "--precision=fp8_block --parallel.zero=3 --precision.high-first=2 --precision.high-last=2": [
        "precision.high_first=2 and high_last=2 are all 4 layers"],
    "--precision.high-last=1": ["precision.high_first and high_last have no effect without a recipe"],
    "--precision.emulate True": ["precision.emulate has no effect without a recipe"],
    "--precision=nvfp4 --memory.stash experts": ["memory.stash: experts in nvfp4 keep codes along tokens"],
    "--optimizer.qk-clip=-1": ["optimizer.qk_clip=-1.0 must be at least 0"],
    "--optimizer.qk-clip=9 --optimizer.qk-clip-alpha=2": ["qk_clip_alpha=2.0 must lie between 0 and 1"],
    "--optimizer.qk-clip-alpha=0.3": ["qk_clip_alpha=0.3 has no effect with qk_clip=0"],
    "--optimizer.qk-clip=9 --model.attention.qk-norm=True": ["optimizer.qk_clip=9.0: qk_norm=True", "bound attention logits"],
    "--optimizer.qk-clip=9 --model.attention.qk-norm=False --optimizer.freeze *.attention.key": [
        "optimizer.qk_clip scales moe_layers.attention.key, which optimizer.freeze holds"],
    "--observe.sample-prompt=": ["observe.sample_prompt is empty", "set sample_tokens to 0"],
}  # fmt: skip


@pytest.mark.parametrize("flags", CONFIGURATIONS)
def test_configuration_that_cannot_run(capsys, flags):
    error = refused(capsys, ["tiny", *flags.split()])
    assert all(part in error for part in CONFIGURATIONS[flags]), error


def test_a_tracker_that_is_not_installed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = refused(capsys, ["tiny", "--observe.trackers", "tensorboard", "wandb"])
    assert "observe.trackers: ['wandb'] are not installed; install moex-jax[track]" in error


def test_all_problems_are_told_at_once(capsys):
    error = refused(capsys, ["tiny", "--train.steps=0", "--model.d-model=0", "--parallel.pp=2"])
    assert all(part in error for part in ("train.steps=0", "model.d_model=0", "parallel.pp=2"))


@pytest.mark.parametrize("name", PRESETS)
def test_printed_configuration_is_read_back(capsys, run_folder, name):
    change = ["--train.seed=7", "--memory.recompute", "attention"]
    assert train.main([name, *change, "--print-config"]) == 0
    text = capsys.readouterr().out
    (run_folder / "run.json").write_text(text)
    config = load("run.json")
    assert config == parse([name, *change]).config
    assert config != PRESETS[name]()
    assert (config.name, config.train.seed, config.memory.recompute) == (name, 7, ("attention",))
    assert train.main(["--config=run.json", "--print-config"]) == 0
    assert capsys.readouterr().out == text


def test_flags_override_a_file(run_folder):
    assert train.main(["tiny", "--print-config"]) == 0
    values = json.loads('{"train": {"steps": 50}, "memory": {"recompute": []}, "folder": "a b"}')
    (run_folder / "run.json").write_text(json.dumps(values))
    config = parse(["--config", "run.json", "--train.seq-len", "32", "--memory.recompute", "moe"]).config
    assert (config.train.steps, config.train.seq_len, config.folder) == (50, 32, "a b")
    assert config.memory.recompute == ("moe",)


@pytest.mark.parametrize("text", ["-1", "--x", "", "a=b", "True", "é\n"])
def test_any_text_survives_a_file(run_folder, capsys, text):
    assert train.main(["tiny", f"--observe.sample-prompt={text}", "--print-config"]) == 0
    (run_folder / "run.json").write_text(capsys.readouterr().out)
    assert load("run.json").observe.sample_prompt == text


def test_child_process_exits_with_2_and_help_with_0(run_folder):
    def run(*arguments, **variables):
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        environ = dict(os.environ, **variables)
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)

    wrong = run("tiny", "--train.stepz=3")
    assert wrong.returncode == 2 and "--train.steps" in wrong.stderr
    launcher = run("tiny", COORDINATOR_ADDRESS="127.0.0.1:1")
    assert launcher.returncode == 2 and "NUM_PROCESSES" in launcher.stderr and "Traceback" not in launcher.stderr
    shown = run("--help")
    assert shown.returncode == 0
    for part in ("--model.router.top-k", "--parallel.ep", "Optimizer steps.", "--print-config"):
        assert part in shown.stdout
