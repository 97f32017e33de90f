//! What needs an RDMA device runs in a virtual machine that has some.

use std::time::Duration;

use forebay_tests::built::unit_tests;
use forebay_tests::machine::run;
use forebay_tests::{Forebay, Outcome, Program};

/// A user who may lock so many KiB of memory, and use the cards, runs `words`.
fn as_nobody(kib: u32, words: &str) -> Program {
    Program::shell(&format!("chmod 666 /dev/infiniband/* && ulimit -l {kib} && exec su nobody -c '{words}'"))
}

/// A machine alone takes 5 to 25 seconds; many times that where all cores are busy.
const PATIENCE: Duration = Duration::from_secs(300);

#[test]
fn a_machine_has_two_devices_and_runs_tests() {
    let devices = "for state in /sys/class/infiniband/*/ports/1/state; do echo $state $(cat $state); done";
    let programs = [
        Program::shell(devices),
        Program::new(unit_tests("forebay-core"), &["--test-threads=2"]),
        Program::shell("echo \"$GREETING\" && exit 3").envs(&[("GREETING", "it's me")]),
    ];
    let Some(ended) = run("a_machine_has_two_devices_and_runs_tests", &programs, PATIENCE) else { return };
    let [devices, tests, failure] = ended.try_into().expect("one outcome for each program");
    let devices = devices.succeeded();
    assert_eq!(devices.lines().filter(|line| line.ends_with(" 4: ACTIVE")).count(), 2, "{devices}");
    let tests = tests.succeeded();
    assert!(tests.contains("test result: ok. ") && !tests.contains(" 0 passed;"), "{tests}");
    assert_eq!((failure.code, failure.stdout.as_str()), (Some(3), "it's me\n"), "{failure}");
}

#[test]
fn cards_read_what_other_hosts_lend_and_fall_back_to_tcp() {
    let test = "cards_read_what_other_hosts_lend_and_fall_back_to_tcp";
    let doctor = Program::new(Forebay::binary(), &["doctor"]);
    let unlocked = as_nobody(1024, &format!("{} doctor", Forebay::binary().display()));
    let inside = Program::new(env!("CARGO_BIN_EXE_rdma-inside").into(), &[]);
    let Some(ended) = run(test, &[doctor, unlocked, inside], PATIENCE) else { return };
    let [doctor, unlocked, inside] = ended.try_into().expect("one outcome for each program");
    let is_told = |line: &str| line.starts_with("ok") && line.ends_with("rxe0:1 (RoCE), rxe1:1 (RoCE)");
    assert!(doctor.stdout.lines().any(is_told), "{doctor}");
    let is_told =
        |line: &str| line.starts_with("warn") && line.contains("TCP what they lack: register memory");
    assert!(unlocked.stdout.lines().any(is_told) && unlocked.stdout.contains("ulimit -l"), "{unlocked}");
    let said = inside.succeeded();
    assert!(said.ends_with("9 scenarios passed\n"), "{said}");
}

/// All that ranks of several hosts do as they read a step between them, and as they hold copies for each other.
#[test]
fn ranks_of_several_hosts_restore_by_their_cards() {
    let test = "ranks_of_several_hosts_restore_by_their_cards";
    let tests = unit_tests("forebay-ckpt");
    // Those that have ways between hosts: an emulated processor takes minutes for the others.
    let between =
        ["ranks_", "what_is_read_aside_", "damage_that_ranks_"].map(|test| format!("restore::tests::{test}"));
    let ranks = Program::new(tests.clone(), &[&between[0], &between[1], &between[2], "--nocapture"]);
    let ranks = ranks.envs(&[("FOREBAY_TEST_RDMA", "auto")]);
    let one = format!("{} restore::tests::ranks_read --nocapture", tests.display());
    let unlocked = as_nobody(64, &format!("FOREBAY_TEST_RDMA=rxe0:1:1,rxe1:1:1 {one}"));
    let copies = Program::new(tests, &["agent::replicas", "--nocapture"]);
    let copies = copies.envs(&[("FOREBAY_TEST_RDMA", "auto")]);
    let Some(ended) = run(test, &[ranks, unlocked, copies], PATIENCE) else { return };
    let [ranks, unlocked, copies]: [Outcome; 3] = ended.try_into().expect("one outcome for each program");
    let (ranks, unlocked, copies) = (ranks.succeeded(), unlocked.succeeded(), copies.succeeded());
    for part in ["test result: ok. 7 passed", "rank 0 has rxe0:1 (RoCE)", "rank 1 has rxe1:1 (RoCE)"] {
        assert!(copies.contains(part), "{part} is not in\n{copies}");
    }
    for part in ["test result: ok. 3 passed", "rank 0 has rxe0:1 (RoCE)", "rank 1 has rxe1:1 (RoCE)"] {
        assert!(ranks.contains(part), "{part} is not in\n{ranks}");
    }
    assert!(!ranks.contains("did without its card"), "{ranks}");
    for part in
        ["test result: ok. 1 passed", "rank 1 has rxe1:1 (RoCE)", "did without its card: register memory"]
    {
        assert!(unlocked.contains(part), "{part} is not in\n{unlocked}");
    }
}
