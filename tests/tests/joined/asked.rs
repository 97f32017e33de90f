//! Who may join, and what people ask of a volume through a mount that did.

use std::fs;
use std::io::Write;

use forebay_tests::{Forebay, Meta, Scratch, require_fuse};

use super::{Hosts, wait_for};

/// Promise S75: Only who knows the secret joins a volume
#[test]
fn who_may_not_join_is_told_why() {
    if !require_fuse("who_may_not_join_is_told_why") {
        return;
    }
    let hosts = Hosts::of_folder();
    let holder = hosts.mount("holder", &[]);
    let try_mount = |options: &[&str]| {
        let (home, at) = (hosts.home("other"), hosts.scratch.folder("other").display().to_string());
        let ours = ["mount", "-f", &hosts.url, &at];
        let arguments: Vec<&str> = ours.iter().chain(options).copied().collect();
        Forebay::new(&home, arguments).run()
    };
    let without = try_mount(&[]);
    assert!(without.stderr.contains("--join-secret"), "{without}");
    let wrong = hosts.scratch.join("wrong");
    fs::write(&wrong, "what nobody but this host knows").expect("written");
    let stranger = try_mount(&["--join-secret", &wrong.display().to_string()]);
    assert!(stranger.stderr.contains("it holds another secret"), "{stranger}");
    let both = try_mount(&["--join-secret", &hosts.secret(), "--writeback"]);
    assert!(both.stderr.contains("staged on one host"), "{both}");
    fs::write(holder.path().join("file"), "whole").expect("nothing happened to it");
}

/// What people ask of a volume through a mount is done where the tree is.
///
/// Promise S76: Commands about the tree
#[test]
fn commands_on_a_mount_that_joined_are_done_where_the_tree_is() {
    if !require_fuse("commands_on_a_mount_that_joined_are_done_where_the_tree_is") {
        return;
    }
    let hosts = Hosts::of_folder();
    let meta_options = ["--config", &trash_configuration(&hosts.scratch)].map(str::to_owned);
    let options: Vec<&str> = meta_options.iter().map(String::as_str).collect();
    let mut meta = Meta::start(&hosts.home("meta"), &hosts.url, &hosts.secret(), &options, &[]);
    let mut mount = hosts.mount("one", &["--join-only", "--trash", "7d"]);
    assert!(mount.log().contains("its --trash counts"), "{}", mount.log());
    let (home, at) = (hosts.home("one"), |name: &str| mount.path().join(name).display().to_string());
    let forebay = |words: &[&str]| Forebay::new(&home, words.iter().copied()).run();
    fs::write(mount.path().join("file"), "text").expect("written");
    let mut open = fs::OpenOptions::new().append(true).open(mount.path().join("file")).expect("opened");
    open.write_all(b" and more").expect("written");
    let mut apart = fs::File::create(mount.path().join("apart")).expect("created");
    apart.write_all(b"half of it").expect("taken");
    // Also what is not closed yet, and nothing of any other file.
    forebay(&["clone", &at("file"), &at("copy")]).succeeded();
    forebay(&["gc", &mount.path().display().to_string()]);
    assert!(!hosts.scratch.join("bucket/apart").exists(), "it may be half of a write");
    drop(apart);
    assert!(hosts.scratch.join("bucket/apart").exists());
    assert_eq!(fs::read_to_string(mount.path().join("copy")).expect("read"), "text and more");
    drop(open);
    fs::create_dir(mount.path().join("small")).expect("made");
    forebay(&["quota", "set", &at("small"), "--bytes", "1MiB"]).succeeded();
    let written = fs::write(mount.path().join("small/large"), vec![1; 2 << 20]);
    assert_eq!(written.expect_err("too large").raw_os_error(), Some(libc::EDQUOT));
    fs::remove_file(mount.path().join("copy")).expect("removed");
    assert!(forebay(&["trash", "ls", &at("")]).succeeded().contains("copy"));
    forebay(&["trash", "restore", &at("copy")]).succeeded();
    wait_for("what was restored", || mount.path().join("copy").exists());
    forebay(&["volume", "policy", &at("small"), "packed"]).succeeded();
    assert!(forebay(&["volume", "policy", &at("small")]).succeeded().contains("packed"));
    forebay(&["fsck", &hosts.url]).succeeded();
    forebay(&["gc", &hosts.url]).succeeded();
    // A dump would be a file elsewhere.
    let dump = forebay(&["volume", "dump", &hosts.url, &at("../dump")]);
    assert!(dump.stderr.contains("127.0.0.1:"), "{dump}");
    mount.unmount();
    meta.end();
}

fn trash_configuration(scratch: &Scratch) -> String {
    let path = scratch.join("trash.toml");
    fs::write(&path, "[volume]\ntrash_ms = 3600000\n").expect("written");
    path.display().to_string()
}
