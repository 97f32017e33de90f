//! Names are found wherever they lie in a tree, and looked for as a restore does.

use forebay_io::object::Bucket;
use serde_json::{Value, json};

use super::*;
use crate::catalog::{Start, list_steps};
use crate::convert::StepWriter;
use crate::dtype::Dtype;
use crate::manifest::{Encoding, Extra, Tensor};
use crate::shard::TensorSpec;

/// A step with these trees, and tensors of these names.
fn step(world_size: u32, extras: &[(&str, &str)], tensors: &[&str]) -> Manifest {
    let extra = |(name, data): &(&str, &str)| Extra {
        name: (*name).into(),
        encoding: Encoding::Json,
        data: (*data).into(),
    };
    let tensor = |name: &&str| Tensor {
        name: (*name).into(),
        dtype: "uint8".into(),
        shape: vec![0],
        slices: Vec::new(),
    };
    Manifest {
        commit: String::new(),
        run: String::new(),
        incarnation: 1,
        step: 5,
        created_ms: 0,
        world_size,
        parents: Vec::new(),
        shards: Vec::new(),
        tensors: tensors.iter().map(tensor).collect(),
        extras: extras.iter().map(extra).collect(),
    }
}

fn lacks(name: &str, tree: &str, rank: u32) -> String {
    format!("lacks tensor `{name}`, which the `{tree}` of rank {rank} names")
}

fn tensor(name: &str) -> Value {
    json!({"t": "tensor", "n": name})
}

#[track_caller]
fn check(tree: &str, named: &[&str]) {
    let expected: Vec<_> = named.iter().map(|name| lacks(name, "state", 0)).collect();
    assert_eq!(faults(&step(1, &[("state", tree)], &["there"])), expected, "{tree}");
    assert_eq!(faults(&step(1, &[("state", tree)], &[&["there"], named].concat())), [""; 0], "{tree}");
}

#[test]
fn every_name_is_found_once_and_nothing_else() {
    let view = json!({"t": "tensor", "view": [[1], [1], 0], "n": "e"});
    let tree = json!({"t": "dict", "v": [
        ["a", tensor("there")], ["n", tensor("w")], ["again", [tensor("w"), {"t": "tuple", "v": [tensor("c")]}]],
        [tensor("key"), {"t": "object", "k": "module", "v": {"t": "odict", "v": [["d", {"n": "d", "t": "array"}]]}}],
        ["v", view], ["t", "tensor"], ["n", "no name"], ["bytes", {"t": "bytes", "n": "f"}],
        ["more", {"t": "bytearray", "n": "g"}], ["p", {"t": "pickle", "n": "h"}], ["b", {"t": "bytes", "v": "eA=="}],
        ["later", {"t": "something new", "n": "not ours"}], ["number", {"t": "tensor", "n": 7}],
        ["text", {"t": "str", "v": "{\"t\": \"tensor\", \"n\": \"in a text\"}"}], ["\\\"", "\"}{][,:"],
    ]});
    check(&tree.to_string(), &["w", "c", "key", "d", "e", "f", "g", "h"]);
    check(&serde_json::to_string_pretty(&tree).expect("text"), &["w", "c", "key", "d", "e", "f", "g", "h"]);
    check(&tensor("alone").to_string(), &["alone"]);
    check(r#"{"\u0074": "\u0074ensor", "\u006e": "\u00e4 \"q\" \ud83d\ude00 \\"}"#, &["ä \"q\" 😀 \\"]);
    // What is at the end of a list or an object is no part of the next.
    check(
        r#"[{"t": "tensor", "x": ["n", "a"]}, {"t": "tensor"}, {"n": "b"}, {"t": "dict", "v": {"n": "c"}}]"#,
        &[],
    );
    for plain in ["null", "5", "\"n\"", "[]", "{}", "\"\"", "12345678901234567890123456789012345678901"] {
        check(plain, &[]);
    }
}

/// A rank has the state of the first where it has none of its own, and its own tensor before that of all.
#[test]
fn names_are_those_of_each_rank_that_reads_them() {
    let tree = |name: &str| tensor(name).to_string();
    let (w, x) = (tree("w"), tree("x"));
    let own = [
        ("state", w.as_str()),
        ("state@2", x.as_str()),
        ("rng", &w),
        ("rng@1", &w),
        ("other", &x),
        ("state@x", &x),
    ];
    assert_eq!(faults(&step(3, &own, &["w", "x"])), [""; 0]);
    assert_eq!(faults(&step(3, &own, &["w@0", "w@1", "x@2"])), [""; 0]);
    assert_eq!(faults(&step(3, &own, &["w", "x@1"])), [lacks("x", "state", 2)]);
    // The third rank's tree does not name it; the second one reads the first one's.
    assert_eq!(faults(&step(3, &own, &["w@0", "w@2", "x"])), [lacks("w", "state", 1), lacks("w", "rng", 1)]);
    assert_eq!(faults(&step(4, &own, &["w@0", "w@1", "x"])), [lacks("w", "state", 3)]);
    // Nobody goes through all of so many.
    assert_eq!(faults(&step(u32::MAX, &own[..1], &["w@0", "w@1", "w@3"])), [lacks("w", "state", 2)]);
    assert_eq!(faults(&step(1, &[], &[])), [""; 0]);
}

#[test]
fn what_is_long_deep_or_no_json_is_told_in_few_words() {
    let many: Vec<_> = (0..MAX_TOLD + 7).map(|number| tensor(&format!("w{number}"))).collect();
    let found = faults(&step(1, &[("state", &json!(many).to_string())], &[]));
    assert_eq!((found.len(), &found[0]), (MAX_TOLD + 1, &lacks("w0", "state", 0)));
    assert_eq!(found[MAX_TOLD], "lacks 7 more tensors that the `state` of rank 0 names");
    let nested = |depth: usize| format!("{}{}{}", "[".repeat(depth), tensor("w"), "]".repeat(depth));
    assert_eq!(faults(&step(1, &[("state", &nested(600))], &[])), [lacks("w", "state", 0)]);
    for (text, why) in [
        (nested(1_000_000), "it is nested without end"),
        ("[\"".into(), "EOF while parsing a string at line 1 column 2"),
        (String::new(), "EOF while parsing a value at line 1 column 0"),
    ] {
        let told = format!("has a `rng@1` that is no tree: {why}");
        assert_eq!(faults(&step(2, &[("rng@1", &text)], &[])), [told]);
    }
}

/// It was said to be whole, and could not be restored.
#[tokio::test]
async fn a_step_that_lacks_what_its_state_names_is_found() {
    let bucket = Bucket::in_memory();
    for (step, name) in [(1, "w"), (2, "lost")] {
        let start = Start { nonce: format!("{step:032x}"), host: "h".into(), pid: 1, started_ms: 5 };
        let spec = TensorSpec::whole("w", Dtype::named("uint8").expect("a type"), vec![3]);
        let mut writer = StepWriter::begin(&bucket, start, step, &[spec]).await.expect("begin");
        writer.write(vec![1, 2, 3].into()).await.expect("write");
        let extra = |name: &str, data: Value| Extra {
            name: name.into(),
            encoding: Encoding::Json,
            data: data.to_string(),
        };
        writer.commit(vec![extra("state", tensor(name)), extra("rng", tensor("w"))]).await.expect("commit");
    }
    let object = list_steps(&bucket).await.expect("steps").pop().expect("a step").key.object();
    let found = crate::verify(&bucket, None, &|_| {}).await.expect("verify");
    let fact = lacks("lost", "state", 0);
    assert_eq!(found, [crate::Finding { step: 2, object: object.as_str().into(), fact }]);
}
