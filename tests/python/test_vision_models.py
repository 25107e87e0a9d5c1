"""gka.vision: windows, gradients, files, and the same numbers as the C++ model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

import gka

PROGRAM = Path(sys.executable).parent / "gka"
CONFIG = {
    "image_size": [20, 17],
    "channels": 1,
    "classes": 3,
    "class_names": ["Bag", "Mütze", "Shoe"],
    "mean": [0.3],
    "std": [0.5],
    "in_dim": 4,
    "dim": 8,
    "stem_strides": [1, 2],
    "depths": [1, 1, 3, 2],
    "kinds": ["conv", "conv", "mixer", "mixer"],
    "heads": [1, 1, 2, 4],
    "window_sizes": [1, 1, 2, 3],
    "layer_scale": 0.5,
}
HEADS = {"head_dim": 16, "expand_k": 0.5, "expand_v": 0.5, "conv_size": 3}
#: Every mixer, with choices away from its defaults where it has them.
MIXERS = {
    "gka": HEADS | {"beta_weight": "paper"},
    "gdn": HEADS,
    "mamba2": {"expand": 1, "head_dim": 8, "state_size": 4, "conv_size": 3},
    "deltanet": {"head_dim": 8},
    "kda": {"head_dim": 8},
    "mesa": {"num_heads": 2},
    "gla": {"num_heads": 2},
    "retnet": {},
    "linear_attn": {},
    "attention": {},
    "mamba": {"state_size": 4},
}


def make(mixer="gka", dtype=torch.float64, **choices):
    """Weights large enough for every part to be seen in the logits, statistics of batch norms included."""
    torch.manual_seed(0)
    config = CONFIG | {"mixer": mixer, "mixer_config": MIXERS[mixer]} | choices
    model = gka.vision.VisionModel(config, dtype=dtype)
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
        elif tensor.is_floating_point() and not name.endswith(("A_log", "dt_bias")):
            tensor.add_(0.2 * torch.randn_like(tensor))
    return model.eval()


def images(count=3, size=(20, 17)):
    return torch.randint(0, 256, (count, *size, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_there_is_a_case_for_every_mixer():
    assert list(MIXERS) == list(gka.vision.MIXERS)


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_program_gives_the_same_logits(mixer, tmp_path):
    """Two models written apart: in float32 both are as near to float64 as float32 is."""
    model, pixels = make(mixer, torch.float32), images(5)
    model.save(tmp_path / "model")
    save_file({"images": pixels, "labels": torch.zeros(5, dtype=torch.long)}, tmp_path / "images.safetensors")
    words = ["eval", tmp_path / "model", "--data", tmp_path / "images.safetensors", "--logits", tmp_path / "logits"]
    done = subprocess.run([PROGRAM, "vision", *words, "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = load_file(tmp_path / "logits")["logits"].double()
    with torch.no_grad():
        exact, python = gka.vision.load(tmp_path / "model", dtype=torch.float64)(pixels), model(pixels).double()
    assert (got - python).norm() < 1e-5 * exact.norm()
    assert (got - exact).norm() < 1e-5 * exact.norm()
    assert (exact - exact.mean(0)).norm() > 0.1 * exact.norm(), "images differ in their logits"


def test_windows_are_read_in_raster_order_and_put_back():
    picture = torch.arange(2 * 5 * 7.0).view(1, 2, 5, 7)
    windows, size = gka.vision.to_windows(picture, 3)
    assert windows.shape == (6, 9, 2) and size == (6, 9)
    assert windows[0, :, 0].tolist() == [0, 1, 2, 7, 8, 9, 14, 15, 16], "the first square, line by line"
    assert windows[5, :, 1].tolist() == [35 + 27, 0, 0, 35 + 34, 0, 0, 0, 0, 0], "zeros right of the picture and below"
    assert torch.equal(gka.vision.from_windows(windows, 3, size)[..., :5, :7], picture)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_parameter_and_the_image_get_a_gradient(mixer):
    model = make(mixer).train()
    pixels = (images() / 255).double().requires_grad_()
    model(pixels).square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # A shift of a channel that a batch norm takes out again has no effect.
    assert [name for name in without if not re.search(r"conv[12]\.bias$", name)] == []
    assert pixels.grad.isfinite().all() and pixels.grad.abs().sum() > 0


def test_a_gradient_is_the_slope_of_the_logits():
    model = make("mamba")
    direction = torch.randn(1, 20, 17, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    pixels = torch.full((1, 20, 17, 1), 0.5, dtype=torch.float64, requires_grad=True)
    (model(pixels)[0, 0]).backward()
    step = 1e-6
    ahead, behind = (model((pixels + sign * step * direction).detach())[0, 0] for sign in (1, -1))
    slope = (ahead - behind) / (2 * step)
    torch.testing.assert_close((pixels.grad * direction).sum(), slope, rtol=1e-6, atol=1e-9)


def test_the_scan_of_mambavision_is_its_sum_over_the_past():
    """y_t = Σ_s C_t · exp(A Σ_{s<i≤t} Δ_i) Δ_s B_s x_s + D x_t, written out."""
    torch.manual_seed(0)
    mixer = gka.vision.MambaVisionMixer(8, state_size=3, dtype=torch.float64)
    mixer.reset_parameters()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    y, z = mixer.in_proj(x).transpose(1, 2).chunk(2, 1)
    y, z = functional.silu(mixer.conv1d_x(y)).transpose(1, 2), functional.silu(mixer.conv1d_z(z)).transpose(1, 2)
    step, b, c = mixer.x_proj(y).split([1, 3, 3], -1)
    delta = functional.softplus(step @ mixer.dt_proj.weight.T + 2 * mixer.dt_proj.bias)
    past, a = delta.cumsum(1), -mixer.A_log.exp()
    fades = torch.exp((past[:, :, None] - past[:, None]).unsqueeze(-1) * a)  # [B, t, s, channels, state]
    seen = torch.ones(5, 5).tril().bool()[None, :, :, None, None]
    terms = torch.einsum("btscn,bsc,bsn,bsc,btn->btc", fades.where(seen, 0), delta, b, y, c)
    expected = mixer.out_proj(torch.cat([terms + mixer.D * y, z], -1))
    torch.testing.assert_close(mixer(x), expected, rtol=1e-10, atol=1e-12)


def test_memories_read_forwards_and_attention_both_ways():
    for mixer, sees in (("gka", False), ("attention", True)):
        block = make(mixer).levels[2].blocks[0]
        tokens = torch.randn(1, 9, 32, dtype=torch.float64)
        changed = tokens.clone()
        changed[:, -1] += 1
        assert bool((block(tokens)[:, 0] != block(changed)[:, 0]).any()) == sees


def test_the_first_half_of_a_level_is_memory_and_the_rest_attention():
    names = make("gka").state_dict()
    for level, memory in ((2, [True, True, False]), (3, [True, False])):
        for block, is_memory in enumerate(memory):
            prefix = f"levels.{level}.blocks.{block}.mixer."
            assert (f"{prefix}k_conv1d.weight" in names, f"{prefix}qkv.weight" in names) == (is_memory, not is_memory)
    assert not any(name.startswith("levels.3.downsample") for name in names)
    assert {"patch_embed.conv_down.4.running_var", "levels.0.downsample.reduction.0.weight", "norm.bias"} <= set(names)


def test_pixels_and_their_255ths_are_the_same_image():
    model = make()
    torch.testing.assert_close(model(images()), model(images().double() / 255), rtol=1e-12, atol=1e-12)


def test_an_image_is_classified_alone_as_among_others():
    model = make()
    torch.testing.assert_close(model(images()[1:2]), model(images())[1:2], rtol=1e-10, atol=1e-10)


def test_dropped_branches_leave_the_rows_and_the_mean_of_the_rest():
    torch.manual_seed(0)
    x = torch.ones(4000, 2, 3)
    dropped = gka.vision._dropped(x, 0.25, True)
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (dropped.flatten(1).std(1) == 0).all(), "a row as a whole"
    assert abs(dropped.mean() - 1) < 0.05
    assert gka.vision._dropped(x, 0.25, False) is x
    rates = [block.drop_path for level in make(drop_path=0.3).levels for block in level.blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])


def test_a_model_may_begin_on_meta():
    with torch.device("meta"):
        model = gka.vision.VisionModel(CONFIG | {"drop_path": 0.3})
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(7)  # whatever lies there
    drawn = gka.vision.VisionModel(CONFIG)
    for each in (model, drawn):
        torch.manual_seed(3)
        each.reset_parameters()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, drawn.state_dict()[name]), name
    assert torch.equal(model.eval()(images()), drawn.eval()(images()))


def test_classify_names_the_likeliest_and_changes_nothing():
    model = make().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = model.classify(images()[0].squeeze(-1).numpy(), top=2)
    assert len(found) == 2 and found[0][1] >= found[1][1]
    expected = make()(images()[:1])[0].detach().float().softmax(-1)
    assert found[0][0] == CONFIG["class_names"][expected.argmax()]
    assert found[0][1] == pytest.approx(float(expected.max()), rel=1e-5)
    assert sum(probability for _, probability in model.classify(images()[0], top=9)) == pytest.approx(1, rel=1e-5)
    assert model.training and all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    with pytest.raises(ValueError, match=r"numbers from \d+ to 25\d; floats are from 0 to 1"):
        model.classify(images()[0].float())


def test_a_picture_is_cut_in_its_middle_and_scaled(tmp_path):
    image = pytest.importorskip("PIL.Image")
    model, pixels = make(), images()[0]
    whole = image.fromarray(pixels.squeeze(-1).numpy())
    whole.save(tmp_path / "picture.png")
    assert model.classify(tmp_path / "picture.png") == model.classify(whole) == model.classify(pixels)
    wide = image.new("RGB", (170, 20))
    wide.paste(whole.convert("RGB"), (76, 0))
    assert model.classify(wide)[0][0] == model.classify(pixels)[0][0]
    deep = image.fromarray(pixels.squeeze(-1).numpy().astype("uint16") * 257)
    deep.save(tmp_path / "deep.png")
    assert model.classify(tmp_path / "deep.png") == model.classify(pixels), "16 bits"
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"text\.png is no picture that can be read"):
        model.classify(tmp_path / "text.png")
    image.MAX_IMAGE_PIXELS, most = 100, image.MAX_IMAGE_PIXELS
    try:
        with pytest.raises(ValueError, match=r"picture\.png is no picture that can be read .*bomb"):
            model.classify(tmp_path / "picture.png")
    finally:
        image.MAX_IMAGE_PIXELS = most


def test_what_is_saved_is_loaded_also_as_a_run(tmp_path):
    model = make(dtype=torch.float32)
    model.save(tmp_path / "run" / "latest")
    stored = load_file(tmp_path / "run" / "latest" / "model.safetensors")
    assert not any(name.endswith("num_batches_tracked") for name in stored)
    for folder in (tmp_path / "run", tmp_path / "run" / "latest"):
        again = gka.vision.load(folder)
        assert again.config == model.config and not again.training
        assert torch.equal(again(images()), model(images()))
    assert gka.vision.load(tmp_path / "run", dtype=torch.float64)(images()).dtype == torch.float64


def refused(call, *arguments):
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    said = str(caught.value)
    assert "\n" not in said and said.endswith((".", ")"))
    return said


def without_checksums(folder, change=None, **config):
    """The folder of a small model, its files changed by hand."""
    make(dtype=torch.float32).save(folder)
    (folder / "CHECKSUMS.xxh64").unlink()
    if config:
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(text | config))
    weights = load_file(folder / "model.safetensors")
    save_file((change or (lambda same: same))(weights), folder / "model.safetensors")
    return folder


def test_weights_that_are_not_the_models_are_one_sentence(tmp_path):
    cases = {
        "has no tensor 'head.bias'": lambda w: {k: v for k, v in w.items() if k != "head.bias"},
        "has a tensor 'extra' that": lambda w: w | {"extra": torch.ones(1)},
        r"the shape of 'head.bias' is [4], and the model's is [3]": lambda w: w | {"head.bias": torch.ones(4)},
        "'head.bias' holds torch.int64": lambda w: w | {"head.bias": torch.ones(3, dtype=torch.long)},
        "'head.bias' has numbers that are not finite": lambda w: w | {"head.bias": torch.tensor([0, 1, torch.inf])},
    }
    for i, (said, change) in enumerate(cases.items()):
        assert said in refused(gka.vision.load, without_checksums(tmp_path / str(i), change))
    counted = without_checksums(tmp_path / "counted", lambda w: w | {"norm.num_batches_tracked": torch.tensor(7)})
    assert gka.vision.load(counted)(images()).isfinite().all()


def test_files_that_are_damaged_or_absent_are_one_sentence(tmp_path):
    folder = tmp_path / "changed"
    make(dtype=torch.float32).save(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\x55")
    assert "model.safetensors" in refused(gka.vision.load, folder)
    assert "has no config.json" in refused(gka.vision.load, tmp_path / "nowhere")
    folder = without_checksums(tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "is damaged" in refused(gka.vision.load, folder)
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in refused(gka.vision.load, folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(gka.vision.load, folder)
    language = without_checksums(tmp_path / "language", model_type="hybrid_qwen3")
    assert "is of a model of type 'hybrid_qwen3'" in refused(gka.vision.load, language)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"colour": 1}, "has a key 'colour' that nobody knows"),
        ({"classes": 0}, "classes is 0; it takes a whole number of at least 1."),
        ({"classes": "ten"}, "classes is 'ten'; it takes a whole number."),
        ({"depths": 4}, "depths is 4; it takes a list."),
        ({"depths": [1, 1, 1.5, 1]}, "depths[2] is 1.5; it takes a whole number."),
        ({"heads": [1, 1]}, "heads has 2 entries; it takes 4."),
        ({"heads": [1, 1, 3, 4]}, "heads[2] is 3, which does not divide the 32 channels of that level."),
        ({"kinds": ["conv"] * 3 + ["pool"]}, "kinds is 'pool'; it takes 'conv' or 'mixer'."),
        ({"class_names": ["one"]}, "class_names has 1 entries; it takes 3."),
        ({"std": [0.0]}, "std is 0.0; it takes numbers above 0."),
        ({"drop_path": 1}, "drop_path is 1.0; it takes a number of at least 0 and below 1."),
        ({"mixer": "lstm"}, "mixer is 'lstm'; it takes 'gka', "),
        ({"mixer_config": {"heads": 2}}, "mixer_config has a key 'heads' that the mixer does not"),
        ({"mixer_config": {"head_dim": 5}}, "head_dim is 5, which does not divide 32."),
        ({"mixer_config": {"num_iter": -1}}, "num_iter is -1; it takes a whole number of at least 0."),
        ({"model_type": "qwen3"}, "is of a model of type 'qwen3', and this opens 'gka_vision'."),
    ],
)
def test_a_configuration_that_makes_no_sense_is_one_sentence(choices, said):
    assert said in refused(gka.vision.VisionModel, CONFIG | choices)


def test_what_is_missing_in_a_configuration_is_named():
    assert "has no 'depths'" in refused(gka.vision.VisionModel, {k: v for k, v in CONFIG.items() if k != "depths"})


def test_images_of_another_size_or_type_are_one_sentence():
    model = make()
    assert "images takes [N, 20, 17, 1] in uint8" in refused(model, images(size=(20, 18)))
    assert "got torch.int64" in refused(model, images().long())
    with pytest.raises(TypeError, match="images takes a tensor"):
        model([1, 2])
