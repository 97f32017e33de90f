//! The list of checks, each with samples that it must catch.

use super::{Finding, Repo, documents, manifests, sources};

/// A rule about the repository's files.
#[derive(Debug)]
pub struct Check {
    /// What it is about.
    pub name: &'static str,
    /// Finds where the rule is broken.
    pub find: fn(&Repo) -> Vec<Finding>,
    /// Small repositories, each of (path, text) pairs, that break the rule.
    pub bad: &'static [&'static [(&'static str, &'static str)]],
    /// One that keeps it.
    pub good: &'static [(&'static str, &'static str)],
}

/// A function of seven times the lines in `$tens`, and the two of its head and end.
macro_rules! long_function {
    ($prefix:literal, $tens:literal) => {
        concat!($prefix, "fn long() {\n", $tens, $tens, $tens, $tens, $tens, $tens, $tens, "}\n")
    };
}

/// Every check.
pub const CHECKS: &[Check] = &[
    Check {
        name: "edges",
        find: manifests::edges,
        bad: &[
            &[("core/Cargo.toml", "[dependencies]\nforebay-io.workspace = true")],
            &[("cache/Cargo.toml", "[dependencies]\nforebay-metadata = { path = \"../metadata\" }")],
            &[("fuse/Cargo.toml", "[dev-dependencies]\nforebay-ckpt.workspace = true")],
            &[("io/Cargo.toml", "[target.'cfg(unix)'.build-dependencies]\nforebay-volume.workspace = true")],
            &[("spare/Cargo.toml", "[dependencies]\nforebay-core.workspace = true")],
            &[("core/Cargo.toml", "[dependencies")],
        ],
        good: &[("volume/Cargo.toml", "[dependencies]\nforebay-cache.workspace = true\nbytes = \"1\"")],
    },
    Check {
        name: "owners of heavy dependencies",
        find: manifests::owners,
        bad: &[
            &[("volume/Cargo.toml", "[dependencies]\nfoyer = \"0.22\"")],
            &[("io/Cargo.toml", "[build-dependencies]\nanyhow = \"1\"")],
        ],
        good: &[
            ("io/Cargo.toml", "[dependencies]\nobject_store = \"0.14\""),
            ("cache/Cargo.toml", "[dev-dependencies]\nobject_store = \"0.14\""),
        ],
    },
    Check {
        name: "file lengths",
        find: sources::file_lengths,
        bad: &[&[("io/src/long.rs", LONG_FILE)]],
        good: &[("io/src/tests.rs", LONG_FILE)],
    },
    Check {
        name: "function lengths",
        find: sources::function_lengths,
        bad: &[
            &[("io/src/a.rs", long_function!("", "\n\n\n\n\n\n\n\n\n\n"))],
            &[("io/src/a.rs", long_function!("pub(crate) async ", "    let x = 1;\n\n\n\n\n\n\n\n\n\n"))],
        ],
        good: &[("io/src/a.rs", long_function!("fn short() {}\n", "\n\n\n\n\n\n\n\n\n"))],
    },
    Check {
        name: "module docs",
        find: sources::module_docs,
        bad: &[
            &[("io/src/a.rs", "use b;\n//! Late.")],
            &[("io/src/a.rs", "/// Not the module's.\nfn f() {}")],
        ],
        good: &[("io/src/a.rs", "#![allow(unsafe_code)]\n\n//! Owns a.\n")],
    },
    Check {
        name: "leftovers",
        find: sources::leftovers,
        bad: &[
            &[("io/src/a.rs", "fn f() { todo!() }")],
            &[("io/src/a.rs", "let x = dbg!(y);")],
            &[("io/src/a.rs", "// FIXME: later")],
            &[("io/src/tests.rs", "#[test]\n#[ignore]\nfn f() {}")],
        ],
        good: &[("io/src/a.rs", "let name = \"todo! FIXME\"; // Names ending in XXXXXX.")],
    },
    Check {
        name: "unwraps",
        find: sources::unwraps,
        bad: &[&[("io/src/a.rs", "let x = y\n    .unwrap();")]],
        good: &[("io/src/a.rs", "#[cfg(test)]\nmod tests {\n    fn f() {\n        y.unwrap();\n    }\n}\n")],
    },
    Check {
        name: "unsafe code",
        find: sources::unsafe_code,
        bad: &[&[("volume/src/reader.rs", "let x = unsafe { *p };")]],
        good: &[("io/src/mem/map.rs", "let x = unsafe { *p };"), ("io/src/a.rs", "#![deny(unsafe_code)]")],
    },
    Check {
        name: "engines",
        find: sources::engines,
        bad: &[
            &[("metadata/src/tree/local.rs", "use slatedb::Db;")],
            &[("volume/src/volume.rs", "let env = heed::EnvOpenOptions::new();")],
        ],
        good: &[
            ("metadata/src/kv/lmdb.rs", "use heed::Env;"),
            ("metadata/src/open.rs", "use crate::kv::slatedb::SlateEngine;"),
        ],
    },
    Check {
        name: "words",
        find: documents::words,
        bad: &[
            &[("README.md", concat!("cd /ro", "ot/forebay"))],
            &[("scripts/setup", concat!("curl https://pypi", ".org/simple"))],
        ],
        good: &[("Cargo.lock", concat!("registry+https://crates", ".io"))],
    },
    Check {
        name: "metrics",
        find: documents::metrics,
        bad: &[&[("io/src/metrics.rs", "pub const A: &str = \"forebay_io_gets_total\";")]],
        good: &[
            ("io/src/metrics.rs", "pub const A: &str = \"forebay_io_gets_total\";"),
            ("docs/metrics.md", "| `forebay_io_gets_total` | requests | GETs |"),
        ],
    },
    Check {
        name: "semantics",
        find: documents::semantics,
        bad: &[
            &[("docs/semantics.md", "**S1.** Close commits.")],
            &[("tests/tests/a.rs", "/// Promise S2: Close commits.\nfn f() {}")],
            &[
                ("docs/semantics.md", "**S1.** Close commits."),
                ("tests/tests/a.rs", "/// Promise S1: Close loses everything.\nfn f() {}"),
            ],
        ],
        good: &[
            ("docs/semantics.md", "# Title\n\n**S1.** After close,\nall is there. Not more.\n\nFree text."),
            (
                "python/tests/test_a.py",
                "    # Promise S1: After close,\n    # all is there.\n    # More words",
            ),
        ],
    },
    Check {
        name: "promises",
        find: documents::promise_table,
        bad: &[
            &[("docs/promises.md", "| it works | `tests/tests/a.rs::walk` | holds |")],
            &[("docs/promises.md", "| it works | - | holds |")],
            &[("docs/promises.md", "| it works | - | perhaps |")],
            &[("docs/promises.md", "| it works | not |")],
            &[("docs/promises.md", "| it works | `make demo` | not |")],
            &[
                (
                    "docs/promises.md",
                    "| it works on every day | `t.rs::b` | holds |\n| it works on every day of a year | `t.rs::b` | holds |",
                ),
                ("t.rs", "fn b() {}"),
            ],
        ],
        good: &[
            (
                "docs/promises.md",
                "| promise | shown by | state |\n|---|---|---|\n| a | `t.rs::b`, `make c` | partly: x |",
            ),
            ("t.rs", "fn b() {}"),
            ("Makefile", "c:\n"),
        ],
    },
];

/// One line more than a file may have.
const LONG_FILE: &str = match std::str::from_utf8(&[b'\n'; 601]) {
    Ok(text) => text,
    Err(_) => unreachable!(),
};
