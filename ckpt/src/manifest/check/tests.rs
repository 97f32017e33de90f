//! Every way in which a manifest can lie, and that each is named.

use std::io::Write;

use forebay_io::codec;

use super::*;
use crate::manifest::{Checksum, Encoding, Extra};
use crate::testing::{chance, rounds};

/// One float32 matrix in two boxes, one flat tensor, one scalar, over two shards.
fn sample() -> Manifest {
    let shard = |layout: &str, size: u64, rank: u32| {
        let (attempt, layout) = ("01234567".to_owned(), layout.to_owned());
        let key = ShardKey { step: 500, incarnation: 3, attempt, rank, save: 4, layout };
        let key = key.object().as_str().to_owned();
        Shard { key, size, header: 4096, crc32c: Checksum(7), rank, step: 500 }
    };
    let slice = |kind, offsets: &[u64], lengths: &[u64], shard, start, end| {
        let (offsets, lengths) = (offsets.to_vec(), lengths.to_vec());
        let (crc32c, blake3) = (Checksum(0x8a91_36aa), Identity([0xcc; 32]));
        Slice { kind, offsets, lengths, shard, start, end, crc32c, blake3 }
    };
    let tensor = |name: &str, dtype: &str, shape: &[u64], slices: Vec<Slice>| Tensor {
        name: name.into(),
        dtype: dtype.into(),
        shape: shape.into(),
        slices,
    };
    Manifest {
        commit: "0123456789abcdef".repeat(2),
        run: "00112233445566778899aabbccddeeff".into(),
        incarnation: 3,
        step: 500,
        created_ms: 1_700_000_000_000,
        world_size: 2,
        parents: vec![400],
        shards: vec![shard("aaaaaaaa", 4096 + 16, 0), shard("bbbbbbbb", 4096 + 16 + 4 + 2, 1)],
        tensors: vec![
            tensor(
                "w",
                "float32",
                &[2, 4],
                vec![
                    slice(SliceKind::Box, &[0, 0], &[2, 2], 0, 4096, 4112),
                    slice(SliceKind::Box, &[0, 2], &[2, 2], 1, 4096, 4112),
                ],
            ),
            tensor("lr", "float32", &[], vec![slice(SliceKind::Box, &[], &[], 1, 4112, 4116)]),
            tensor("f", "uint8", &[1, 2], vec![slice(SliceKind::Flat, &[0], &[2], 1, 4116, 4118)]),
        ],
        extras: vec![Extra { name: "state".into(), encoding: Encoding::Json, data: "{\"t\":1}".into() }],
    }
}

/// Says that another step wrote a shard.
fn rewrite_step(shard: &mut Shard, step: u64) {
    shard.key = shard.key.replace("500/", &format!("{step}/"));
    shard.step = step;
}

/// Applies `change` to the sample and expects it to be refused with `fact` in the message.
fn refused(fact: &str, change: impl FnOnce(&mut Manifest)) {
    let mut manifest = sample();
    change(&mut manifest);
    let message = manifest.check().expect_err(fact).to_string();
    assert!(message.contains(fact), "`{message}` does not say `{fact}`");
    assert_eq!(manifest.encode().expect_err(fact).kind(), forebay_core::ErrorKind::Bug);
}

#[test]
fn every_lie_is_named() {
    sample().check().expect("the sample holds together");
    Manifest { world_size: 65_536, ..sample() }.check().expect("as many ranks as there may be");
    refused("32 hex digits", |m| m.commit = "xyz".into());
    refused("incarnation is 0", |m| m.incarnation = 0);
    refused("world size is 0", |m| m.world_size = 0);
    refused("world size is 65537, more than 65536", |m| m.world_size = 65_537);
    refused("more than 65536", |m| m.world_size = u32::MAX);
    refused("not ascending", |m| m.parents = vec![400, 300]);
    refused("not ascending", |m| m.parents = vec![500]);
    refused("shard `shards/000000", |m| m.shards[1] = m.shards[0].clone());
    refused("tensor `w` twice", |m| m.tensors[1].name = "w".into());
    refused("no shard has such a key", |m| m.shards[0].key = "../../etc/passwd".into());
    refused("another step's, start's or rank's", |m| {
        m.shards[0].key = m.shards[0].key.replace("500/", "400/")
    });
    refused("another step's, start's or rank's", |m| m.shards[0].key = m.shards[0].key.replace("03-", "02-"));
    refused("another step's, start's or rank's", |m| {
        m.shards[0].key = m.shards[0].key.replace("/000000-", "/000001-")
    });
    refused("rank 2 of 2", |m| {
        m.shards[0].key = m.shards[0].key.replace("/000000-", "/000002-");
        m.shards[0].rank = 2;
    });
    refused("a header of 9999", |m| m.shards[0].header = 9999);
    refused("a header of 0", |m| m.shards[0].header = 0);
    refused("no parent", |m| rewrite_step(&mut m.shards[0], 300));
    refused("belong to nothing", |m| m.shards[0].size += 1);
    refused("`float31` is not supported", |m| m.tensors[0].dtype = "float31".into());
    refused("65 dimensions", |m| m.tensors[0].shape = vec![1; 65]);
    refused("does not fit 64 bits", |m| m.tensors[0].shape = vec![u64::MAX, 2]);
    refused("hold 8 elements of 12", |m| m.tensors[0].shape = vec![3, 4]);
    refused("hold 4 elements of 8", |m| drop(m.tensors[0].slices.pop()));
    refused("lies outside", |m| m.tensors[0].slices[1].offsets[1] = 3);
    refused("lies outside", |m| m.tensors[0].slices[1].offsets[1] = u64::MAX);
    refused("overlap", |m| m.tensors[0].slices[1].offsets[1] = 1);
    refused("shard 2 of 2", |m| m.tensors[0].slices[0].shard = 2);
    refused("lie outside the shard's", |m| m.tensors[0].slices[0].start = 0);
    refused("lie outside the shard's", |m| m.tensors[0].slices[0].end = u64::MAX);
    refused("lie outside the shard's", |m| m.tensors[0].slices[0].end = 4090);
    refused("has 15 bytes, not 16", |m| m.tensors[0].slices[0].end -= 1);
    refused("share byte", |m| {
        m.tensors[1].slices[0].start = 4108;
        m.tensors[1].slices[0].end = 4112;
    });
    refused("two kinds", |m| {
        m.tensors[0].slices[1].kind = SliceKind::Flat;
        m.tensors[0].slices[1].offsets = vec![4];
        m.tensors[0].slices[1].lengths = vec![4];
    });
    refused("slices, more than", |m| {
        let slice = m.tensors[0].slices[0].clone();
        m.tensors[0].slices = vec![slice; MAX_SLICES + 1];
    });
    refused("lies outside", |m| {
        let slice = m.tensors[0].slices[0].clone();
        m.tensors[1].slices = vec![slice.clone(), slice];
    });
}

#[test]
fn a_scalar_in_two_slices_is_refused() {
    let mut manifest = sample();
    let slice = manifest.tensors[1].slices[0].clone();
    manifest.tensors[1].slices.push(slice);
    let message = manifest.check().expect_err("two").to_string();
    assert!(message.contains("hold 2 elements of 1"), "{message}");
}

#[test]
fn shards_of_parents_may_hold_more_than_is_used() {
    let mut manifest = sample();
    rewrite_step(&mut manifest.shards[0], 400);
    manifest.shards[0].size += 1000;
    manifest.check().expect("a delta refers to part of an earlier shard");
}

/// The whole format, to the byte. If this fails, the format changed: it needs a new version.
#[test]
fn manifest_bytes_are_pinned() {
    let body = concat!(
        r#"{"commit":"0123456789abcdef0123456789abcdef","run":"00112233445566778899aabbccddeeff","#,
        r#""incarnation":3,"step":500,"created_ms":1700000000000,"world_size":2,"parents":[400],"shards":["#,
        r#"{"key":"shards/00000000000000000500/0000000003-01234567/000000-000004-aaaaaaaa.safetensors","#,
        r#""size":4112,"header":4096,"#,
        r#""crc32c":"00000007","rank":0,"step":500},"#,
        r#"{"key":"shards/00000000000000000500/0000000003-01234567/000001-000004-bbbbbbbb.safetensors","#,
        r#""size":4118,"header":4096,"#,
        r#""crc32c":"00000007","rank":1,"step":500}],"tensors":["#,
        r#"{"name":"w","dtype":"float32","shape":[2,4],"slices":["#,
        r#"{"kind":"box","offsets":[0,0],"lengths":[2,2],"shard":0,"start":4096,"end":4112,"crc32c":"8a9136aa","#,
        r#""blake3":"cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc"},"#,
        r#"{"kind":"box","offsets":[0,2],"lengths":[2,2],"shard":1,"start":4096,"end":4112,"crc32c":"8a9136aa","#,
        r#""blake3":"cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc"}]},"#,
        r#"{"name":"lr","dtype":"float32","shape":[],"slices":["#,
        r#"{"kind":"box","offsets":[],"lengths":[],"shard":1,"start":4112,"end":4116,"crc32c":"8a9136aa","#,
        r#""blake3":"cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc"}]},"#,
        r#"{"name":"f","dtype":"uint8","shape":[1,2],"slices":["#,
        r#"{"kind":"flat","offsets":[0],"lengths":[2],"shard":1,"start":4116,"end":4118,"crc32c":"8a9136aa","#,
        r#""blake3":"cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc"}]}],"#,
        r#""extras":[{"name":"state","encoding":"json","data":"{\"t\":1}"}]}"#
    );
    let head = format!(
        r#"{{"format":"forebay-checkpoint","version":1,"blake3":"{}","body":"#,
        blake3::hash(body.as_bytes()).to_hex()
    );
    let encoded = sample().encode().expect("encode");
    assert_eq!(std::str::from_utf8(&encoded).expect("text"), format!("{head}{body}}}\n"));
    assert_eq!(Manifest::decode(&encoded).expect("decode"), sample());
    assert_eq!(Manifest::commit_at_head(&encoded[..Manifest::HEAD_BYTES]), Some(&*sample().commit));
    assert_eq!(Manifest::commit_at_head(&encoded[..Manifest::HEAD_BYTES - 1]), None);
    assert_eq!(Manifest::commit_at_head(&sample().encode_index().expect("an index")), None);
}

#[test]
fn any_changed_byte_is_refused() {
    let encoded = sample().encode().expect("encode");
    for position in 0..encoded.len() {
        for bit in [0, 5] {
            let mut damaged = encoded.to_vec();
            damaged[position] ^= 1 << bit;
            assert!(Manifest::decode(&damaged).is_err(), "bit {bit} of byte {position}");
        }
        assert!(Manifest::decode(&encoded[..position]).is_err(), "cut at {position}");
    }
    assert!(Manifest::decode(&[&encoded[..], b"\n"].concat()).is_err(), "one byte more");
}

/// One with as many slices more as make it too long for people.
fn long() -> Manifest {
    let mut manifest = sample();
    let count = 2000;
    let (shard, last) = (1, manifest.shards[1].size);
    let slices = (0..count).map(|at| Slice {
        kind: SliceKind::Flat,
        offsets: vec![at],
        lengths: vec![1],
        shard,
        start: last + at,
        end: last + at + 1,
        crc32c: Checksum(at as u32),
        blake3: Identity::of(&at.to_le_bytes()),
    });
    let slices = slices.collect();
    manifest.shards[1].size += count;
    manifest.tensors.push(Tensor { name: "many".into(), dtype: "uint8".into(), shape: vec![count], slices });
    manifest
}

#[test]
fn a_long_manifest_is_packed_behind_a_line_of_text() {
    let (manifest, encoded) = (long(), long().encode().expect("encode"));
    let text = serde_json::to_vec(&manifest).expect("json");
    assert!(encoded.len() * 3 < text.len(), "{} bytes of {}", encoded.len(), text.len());
    let end = encoded.iter().position(|byte| *byte == b'\n').expect("a line");
    let (line, body) = encoded.split_at(end + 1);
    let hash = blake3::hash(body).to_hex();
    let head = r#"{"format":"forebay-checkpoint","version":2,"blake3":""#;
    let expected = format!("{head}{hash}\",\"commit\":\"{}\"}}\n", manifest.commit);
    assert_eq!(std::str::from_utf8(line).expect("text"), expected);
    assert_eq!(codec::unpack(body, text.len()).expect("a zstd stream"), text);
    assert_eq!(Manifest::decode(&encoded).expect("decode"), manifest);
    assert_eq!(Manifest::commit_at_head(&encoded[..Manifest::HEAD_BYTES]), Some(&*manifest.commit));
    let index = manifest.encode_index().expect("an index");
    assert_eq!(Manifest::decode_index(&index).expect("decode"), manifest);
    assert_eq!(Manifest::commit_at_head(&index[..Manifest::HEAD_BYTES]), None);
}

#[test]
fn any_changed_byte_of_a_packed_one_is_refused() {
    let encoded = long().encode().expect("encode");
    let head = encoded.iter().position(|byte| *byte == b'\n').expect("a line") + 20;
    for seed in rounds(1) {
        let rng = chance(seed);
        let others = (0..1000).map(|_| head + rng.below((encoded.len() - head) as u64) as usize);
        for position in (0..head).chain(others).chain(encoded.len() - 20..encoded.len()) {
            let mut damaged = encoded.to_vec();
            damaged[position] ^= 1 << rng.below(8);
            Manifest::decode(&damaged).expect_err("one bit");
            Manifest::decode(&encoded[..position]).expect_err("cut off");
        }
    }
    Manifest::decode(&[&encoded[..], b"\n"].concat()).expect_err("one byte more");
}

/// What unpacks to more than any manifest has, or to no manifest, as someone who means harm would write it.
#[test]
fn signed_nonsense_that_is_packed_is_refused() {
    let commit = sample().commit;
    let frame = |packed: &[u8], commit: &str| {
        let hash = blake3::hash(packed).to_hex();
        let head = r#"{"format":"forebay-checkpoint","version":2,"blake3":""#;
        [format!("{head}{hash}\",\"commit\":\"{commit}\"}}\n").as_bytes(), packed].concat()
    };
    let pack = |text: &str| codec::pack(text.as_bytes()).expect("packed");
    let body = serde_json::to_string(&sample()).expect("json");
    Manifest::decode(&frame(&pack(&body), &commit)).expect("packed as it need not be");
    let endless = {
        let mut packed = codec::Compressor::new(Vec::new()).expect("a stream");
        let spaces = [b' '; 1 << 20];
        (0..16).for_each(|_| packed.write_all(&spaces).expect("written"));
        packed.finish().expect("finished")
    };
    for (data, fact) in [
        (frame(&pack(&body), &"0".repeat(32)), "does not begin and end"),
        (frame(&pack("{}"), &commit), "missing field"),
        (frame(&pack(&format!("{body}{{}}")), &commit), "trailing characters"),
        (frame(&pack(&body)[..100], &commit), "not as the format has it"),
        (frame(body.as_bytes(), &commit), "not as the format has it"),
        (frame(&endless, &commit), "more than a manifest may have"),
    ] {
        let message = Manifest::decode(&data).expect_err(fact).to_string();
        assert!(message.contains(fact), "`{message}` does not say `{fact}`");
    }
}

/// A body with a right hash but wrong JSON, as someone who means harm would write it.
#[test]
fn signed_nonsense_is_refused() {
    let frame = |version: &str, body: &str| {
        let hash = blake3::hash(body.as_bytes()).to_hex();
        let head = r#"{"format":"forebay-checkpoint","version":"#;
        format!("{head}{version},\"blake3\":\"{hash}\",\"body\":{body}}}\n")
    };
    let body = serde_json::to_string(&sample()).expect("json");
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    for (text, fact) in [
        (frame("3", &body), "version 3"),
        (frame("1", &deep), "invalid type"),
        (frame("1", "{}"), "missing field"),
        (frame("1", &body.replacen("\"step\"", "\"stem\"", 1)), "unknown field"),
        (frame("1", &body.replacen("00000007", "+0000007", 1)), "8 lowercase hex"),
        (frame("1", &body.replacen("8a9136aa", "8A9136AA", 1)), "8 lowercase hex"),
        (frame("1", &body.replacen("4112", "-1", 1)), "invalid value"),
        (frame("1", &body.replacen("\"box\"", "\"ball\"", 1)), "unknown variant"),
    ] {
        let message = Manifest::decode(text.as_bytes()).expect_err(fact).to_string();
        assert!(message.contains(fact), "`{message}` does not say `{fact}`");
    }
}
