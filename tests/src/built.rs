//! Finding what cargo built of other packages.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::{process, repository};

/// The program that runs the unit tests of `package`'s library. The gate has built it before any test runs, and cargo
/// only tells where; a run of this package's tests alone has cargo build it, which takes minutes.
pub fn unit_tests(package: &str) -> PathBuf {
    let cargo = std::env::var_os("CARGO").expect("tests are run by cargo");
    let mut command = Command::new(cargo);
    // All packages, as in the gate: for a part of them, what they share would be built anew, with fewer features.
    command.args(["test", "--quiet", "--no-run", "--message-format=json"]).current_dir(repository());
    let test = std::env::current_exe().expect("a test knows its own path");
    command.env("CARGO_TARGET_DIR", test.ancestors().nth(3).expect("tests lie in TARGET/PROFILE/deps"));
    let output = process::output(&mut command).expect("cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("cargo writes UTF-8");
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let library = package.replace('-', "_");
    let found =
        messages.filter(|message| message["target"]["name"] == *library).find_map(executable_of_tests);
    found.unwrap_or_else(|| panic!("cargo builds no unit tests of {package}"))
}

fn executable_of_tests(message: Value) -> Option<PathBuf> {
    let of_tests = message["profile"]["test"] == true && message["target"]["kind"][0] == "lib";
    message["executable"].as_str().filter(|_| of_tests).map(PathBuf::from)
}
