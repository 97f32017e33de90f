//! The `forebay` binary.

fn main() {}
