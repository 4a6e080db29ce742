"""A tokenizer and a corpus small enough to train on in a second or two."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.kernels import reference
from workbench.model import beam, cache, checkpoint, config, context, tokenizer
from workbench.model.beam import Beam
from workbench.model.checkpoint import load
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config
from workbench.model.tokenizer import Tokenizer
from workbench.spec.drafter import Drafter
from workbench.training import bpe, corpus, evaluate, optimizer, pretrain, sources, state
from workbench.training.documents import Document
from workbench.training.drafter_start import start
from workbench.training.settings import TrainingSettings

VOCABULARY = 400
TEXTS: list[ModuleType] = [
    beam, cache, checkpoint, config, context, tokenizer, reference,
    bpe, corpus, evaluate, optimizer, sources, state,
]  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of VOCABULARY tokens, trained on the workbench's own sources."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [inspect.getsource(module) for module in TEXTS]
    bpe.write_tokenizer(folder, bpe.train_tokenizer(texts, vocab_size=VOCABULARY))
    return folder


@pytest.fixture(scope="session")
def small_tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer_folder)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Tokenizer) -> Path:
    """``train.tokens.u16`` of the same sources."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = [
        Document(package="a", path=f"{m.__name__}.py", kind="code", text=inspect.getsource(m))
        for m in TEXTS
    ]
    bpe.write_tokens(small_tokenizer, documents, folder / "train.tokens.u16")
    return folder


@pytest.fixture(scope="session")
def small_config() -> BeamConfig:
    """Every kind of layer, two query heads a KV head, and a window that hides something."""
    return BeamConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
        mlp_layer_types=("dense", "sparse", "sparse"),
        sliding_window=8,
        max_position_embeddings=64,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.5,
        final_logit_softcapping=30.0,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


@pytest.fixture
def make_settings(
    tmp_path: Path, corpus_folder: Path, tokenizer_folder: Path, small_config: BeamConfig
) -> Callable[..., TrainingSettings]:
    """Settings of a run of a few steps; keywords change fields, ``name`` the output folders."""

    def make(name: str = "run", **changes: Any) -> TrainingSettings:
        settings = TrainingSettings(
            model=small_config,
            output=tmp_path / name,
            state=tmp_path / f"{name}-state",
            corpus=str(corpus_folder),
            tokenizer=tokenizer_folder,
            steps=12,
            batch=4,
            length=32,
            warmup=3,
            evaluate_bytes=0,
        )
        return replace(settings, **changes)

    return make


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread only adds the cost of waking it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def target_folder(
    tmp_path_factory: pytest.TempPathFactory,
    corpus_folder: Path,
    tokenizer_folder: Path,
    small_config: BeamConfig,
) -> Path:
    """A checkpoint that has learnt a little: a target whose next token is no coin toss."""
    folder = tmp_path_factory.mktemp("target")
    settings = TrainingSettings(
        model=small_config,
        output=folder / "model",
        state=folder / "state",
        corpus=str(corpus_folder),
        tokenizer=tokenizer_folder,
        steps=60,
        batch=8,
        length=48,
        warmup=3,
        evaluate_bytes=0,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pretrain.train(settings)
    torch.set_num_threads(threads)
    return folder / "model"


@pytest.fixture
def target(target_folder: Path) -> Beam:
    """Its model, float32."""
    return load(target_folder)


@pytest.fixture
def drafter_config(small_config: BeamConfig) -> DFlash2Config:
    """Two layers, a window shorter than the sequences, and blocks of five."""
    return DFlash2Config(
        vocab_size=small_config.vocab_size,
        hidden_size=small_config.hidden_size,
        max_position_embeddings=small_config.max_position_embeddings,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        target_layer_ids=(0, 1, 2),
        mask_token_id=3,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=8,
        selector_top_k=6,
        final_logit_softcapping=30.0,
        block_size=5,
    )


@pytest.fixture
def drafter(drafter_config: DFlash2Config, target: Beam) -> Drafter:
    """Every parameter random: no convolution is the identity, no codebook zero."""
    made = start(drafter_config, target, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return made
