//! What a job of many ranks costs each of them, beside its bytes: to plan its first save, and to write and read a step's manifest.
//!
//! The job is made up: ranks that shard a model of 70 billion parameters (Llama 3's shapes) and its optimizer's state along the first
//! dimension, as FSDP2 does.

use std::collections::HashSet;

use anyhow::{Context as _, Result, ensure};
use forebay_ckpt::manifest::{Checksum, Identity, Manifest, Shard, ShardKey, Slice, SliceKind, Tensor};
use forebay_ckpt::plan::plan;
use forebay_ckpt::roster::{Roster, Word};
use forebay_io::codec;

use super::common::{MIB, a_second};
use crate::context::Context;
use crate::report::{Aim, Row};
use crate::sample::{Pairs, measure};

const NAME: &str = "ranks";
const RANKS: u64 = 1024;
/// The first bytes of each shard file.
const HEADER: u64 = 4096;

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let (tensors, pairs) = (tensors(), context.settings.pairs);
    let (outlines, words) = said(&tensors)?;
    let count = (tensors.iter().filter(|tensor| tensor.is_sharded).count() as u64 * RANKS) as f64;
    let planned = || {
        measure(None, || {
            let roster = Roster::read(&outlines, &words)?;
            let planned = plan(&roster, &HashSet::new(), &[], 1)?;
            ensure!(!planned.shares.is_empty(), "a rank writes something");
            Ok(count)
        })
    };
    let parsed = || {
        measure(None, || {
            let mut numbers = 0;
            for word in &words {
                numbers += serde_json::from_str::<Vec<u64>>(&word.parts)?.len();
            }
            ensure!(numbers > 0, "ranks said something");
            Ok(count)
        })
    };
    let name = format!("planning one of {RANKS} ranks of a 70B model");
    let figures = Pairs::run(pairs, planned, parsed)?.figures(a_second);
    let mut rows = vec![Row::of_pairs(NAME, &name, "slices/s", &figures, "parsing what they say")];
    let manifest = manifest(&tensors);
    let (text, data) = (serde_json::to_string(&manifest)?, manifest.encode()?);
    let size = text.len() as f64;
    let written = || measure(None, || Ok(manifest.encode().map(|_| size)?));
    let packed = || {
        measure(None, || {
            let text = serde_json::to_string(&manifest)?;
            Ok(codec::pack(text.as_bytes()).map(|_| size)?)
        })
    };
    let rate = |sample: &crate::sample::Sample| sample.amount / MIB / sample.seconds;
    let name = format!("writing the manifest of {RANKS} ranks, checks and hash");
    let figures = Pairs::run(pairs, written, packed)?.figures(rate);
    rows.push(Row::of_pairs(NAME, &name, "MiB/s of text", &figures, "text, packed"));
    let read = || measure(None, || Ok(Manifest::decode(&data).map(|_| size)?));
    let at = data.iter().position(|byte| *byte == b'\n').context("a line before the packed text")?;
    let unpacked = || {
        measure(None, || {
            let text = codec::unpack(&data[at + 1..], text.len())?;
            Ok(serde_json::from_slice::<Manifest>(&text).map(|_| size)?)
        })
    };
    let name = format!("reading the manifest of {RANKS} ranks, checks and hash");
    let figures = Pairs::run(pairs, read, unpacked)?.figures(rate);
    rows.push(Row::of_pairs(NAME, &name, "MiB/s of text", &figures, "unpacked as a whole, and parsed"));
    let stored = [data.len() as f64 / count];
    let row = Row::of_values(NAME, "a manifest's bytes for a slice, as it is stored", "bytes", &stored);
    rows.push(row.aim(Aim::AtMost(64.0)));
    Ok(rows)
}

/// A tensor over all ranks, which each has a part of, or for itself alike.
struct Named {
    name: String,
    shape: Vec<u64>,
    is_sharded: bool,
}

fn tensors() -> Vec<Named> {
    let (hidden, inner, values, words) = (8192, 28_672, 1024, 128_256);
    let mut weights = vec![("model.embed_tokens.weight".to_owned(), vec![words, hidden])];
    for layer in 0..80 {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        for (part, rows, columns) in [
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", values, hidden),
            ("self_attn.v_proj", values, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ] {
            weights.push((name(part), vec![rows, columns]));
        }
        weights.push((name("input_layernorm"), vec![hidden]));
        weights.push((name("post_attention_layernorm"), vec![hidden]));
    }
    weights.push(("model.norm.weight".to_owned(), vec![hidden]));
    weights.push(("lm_head.weight".to_owned(), vec![words, hidden]));
    let mut tensors = Vec::new();
    for (name, shape) in weights {
        let state = |part: &str| format!("optimizer.state.{name}.{part}");
        for name in [name.clone(), state("exp_avg"), state("exp_avg_sq")] {
            tensors.push(Named { name, shape: shape.clone(), is_sharded: true });
        }
        tensors.push(Named { name: state("step"), shape: Vec::new(), is_sharded: false });
    }
    tensors
}

/// The rows of a tensor that a rank has.
fn rows_of(tensor: &Named, rank: u64) -> (u64, u64) {
    let (rows, each) = (tensor.shape[0], tensor.shape[0].div_ceil(RANKS));
    ((rank * each).min(rows), ((rank + 1) * each).min(rows))
}

/// What the ranks say to each other.
fn said(tensors: &[Named]) -> Result<(Vec<String>, Vec<Word>)> {
    let placement = |tensor: &Named| if tensor.is_sharded { "part" } else { "local" };
    let described =
        |tensor: &Named| (tensor.name.clone(), "float32", tensor.shape.clone(), placement(tensor));
    let outline = serde_json::json!({ "tensors": tensors.iter().map(described).collect::<Vec<_>>() });
    let own = tensors.iter().enumerate().filter(|(_, tensor)| !tensor.is_sharded);
    let bytes: Vec<_> = own.map(|(number, _)| (number, "00002041")).collect();
    let bytes = serde_json::to_string(&bytes)?;
    let mut words = Vec::new();
    for rank in 0..RANKS {
        let mut parts = Vec::new();
        for tensor in tensors.iter().filter(|tensor| tensor.is_sharded) {
            let (first, end) = rows_of(tensor, rank);
            let columns = &tensor.shape[1..];
            parts.extend([first].into_iter().chain(columns.iter().map(|_| 0)));
            parts.extend([end - first].iter().chain(columns));
        }
        words.push(Word { outline: 0, parts: serde_json::to_string(&parts)?, bytes: bytes.clone() });
    }
    Ok((vec![outline.to_string()], words))
}

/// What their step says.
fn manifest(tensors: &[Named]) -> Manifest {
    let mut ends = vec![HEADER; RANKS as usize];
    let mut number = 0_u64;
    let mut slice = |rank: u64, offsets: Vec<u64>, lengths: Vec<u64>| {
        number += 1;
        let (blake3, start) = (Identity::of(&number.to_le_bytes()), ends[rank as usize]);
        let crc32c = Checksum(u32::from_le_bytes([blake3.0[0], blake3.0[1], blake3.0[2], blake3.0[3]]));
        ends[rank as usize] += 4 * lengths.iter().product::<u64>();
        let (kind, shard, end) = (SliceKind::Box, rank as u32, ends[rank as usize]);
        Slice { kind, offsets, lengths, shard, start, end, crc32c, blake3 }
    };
    let mut described = Vec::new();
    for tensor in tensors {
        let (name, shape, dtype) = (tensor.name.clone(), tensor.shape.clone(), "float32".to_owned());
        let ranks = (0..RANKS).filter(|rank| match tensor.is_sharded {
            true => rows_of(tensor, *rank).0 < rows_of(tensor, *rank).1,
            false => *rank == 0,
        });
        let slices = ranks.map(|rank| {
            let (mut offsets, mut lengths) = (vec![0; shape.len()], shape.clone());
            if tensor.is_sharded {
                let (first, end) = rows_of(tensor, rank);
                (offsets[0], lengths[0]) = (first, end - first);
            }
            slice(rank, offsets, lengths)
        });
        let slices = slices.collect();
        described.push(Tensor { name, dtype, shape, slices });
    }
    let shard = |rank: u64| {
        let (attempt, layout) = ("01234567".to_owned(), "0a0a0a0a".to_owned());
        let key = ShardKey { step: 500, incarnation: 1, attempt, rank: rank as u32, save: 1, layout };
        let (key, size) = (key.object().as_str().to_owned(), ends[rank as usize]);
        Shard { key, size, header: HEADER, crc32c: Checksum(7), rank: rank as u32, step: 500 }
    };
    Manifest {
        commit: "c0".repeat(16),
        run: "c1".repeat(16),
        incarnation: 1,
        step: 500,
        created_ms: 1_700_000_000_000,
        world_size: RANKS as u32,
        parents: Vec::new(),
        shards: (0..RANKS).map(shard).collect(),
        tensors: described,
        extras: Vec::new(),
    }
}
