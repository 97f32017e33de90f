//! Bad input ends with one clear error, its cause and a hint, an exit code that is not 0, and nothing lost.

use std::path::Path;

use forebay_tests::{Forebay, Mount, Outcome, Scratch, require_fuse, shell};

/// Runs `forebay ARGS` with its own home in `scratch`.
fn forebay(scratch: &Scratch, args: &[&str]) -> Outcome {
    Forebay::new(&scratch.folder("home"), args).run()
}

fn url(folder: &Path) -> String {
    format!("file://{}", folder.display())
}

#[test]
fn unknown_options_and_malformed_urls() {
    let scratch = Scratch::new();
    let folder = scratch.folder("mnt");
    let mnt = folder.to_str().expect("scratch paths are text");
    let outcome = forebay(&scratch, &["mount", "--no-such-option", "s3://b", mnt]);
    assert_eq!(outcome.code, Some(2), "{outcome}");
    assert!(outcome.stderr.contains("--no-such-option"), "{outcome}");
    forebay(&scratch, &["mount", "ftp://b", mnt]).failed_with("ftp", "s3://");
    forebay(&scratch, &["mount", "https://host/b", mnt]).failed_with("a server", "AWS_ENDPOINT_URL");
    forebay(&scratch, &["mount", "s3://", mnt]).failed_with("no bucket", "s3://bucket");
    forebay(&scratch, &["mount", "--memory", "lots", "s3://b", mnt]).failed_with("lots", "512MiB");
}

#[test]
fn a_missing_bucket_folder() {
    let scratch = Scratch::new();
    let (bucket, folder) = (scratch.join("absent"), scratch.folder("mnt"));
    let mnt = folder.to_str().expect("scratch paths are text");
    forebay(&scratch, &["mount", &url(&bucket), mnt]).failed_with("absent", "mkdir");
    assert!(!bucket.exists(), "a refused mount makes nothing");
}

/// Root itself is kept out of it: without the right to pass over permissions, and on a file system that is read-only.
#[test]
fn a_directory_that_cannot_be_used_is_named_with_a_hint() {
    let scratch = Scratch::new();
    let (bucket, mnt) = (scratch.folder("bucket"), scratch.folder("mnt"));
    if shell(scratch.path(), "unshare --mount true").code != Some(0) {
        return forebay_tests::settings::skip(
            "a_directory_that_cannot_be_used_is_named_with_a_hint",
            "mount namespaces need root",
        );
    }
    let (source, home) = (url(&bucket), scratch.folder("home"));
    let run = |before: &str, words: &str| {
        let program = Forebay::binary();
        let limited = format!(
            "{before} env HOME={0} XDG_STATE_HOME={0}/state {1} {words}",
            home.display(),
            program.display()
        );
        shell(scratch.path(), &limited)
    };
    let home_of_tree = mnt.display().to_string();
    run("", &format!("mount {source} {home_of_tree}")).succeeded();
    shell(
        scratch.path(),
        "umount mnt && while test -n \"$(ls home/state/forebay/mounts)\"; do sleep 0.1; done",
    )
    .succeeded();
    let denied = format!("{source}: Permission denied");
    let unprivileged = "chown 12345 bucket && chmod 700 bucket && exec setpriv --bounding-set -dac_override,-dac_read_search --";
    for words in
        [format!("ckpt ls {source}"), format!("mount {source} {}", mnt.display()), format!("fsck {source}")]
    {
        run(unprivileged, &words).failed_with(&denied, "`ls -ld`");
    }
    // What it may list and not write to is told by the place, too.
    let listing = "chown -R 12345 bucket && chmod 755 bucket && exec setpriv --bounding-set -dac_override,-dac_read_search --";
    for words in [format!("fsck {source}"), format!("gc {source}")] {
        run(listing, &words).failed_with("bucket/.forebay/volume.lock: Permission denied", "`ls -ld`");
    }
    let fixed = |words: &str| {
        run("exec unshare --mount bash -c 'mount --bind -o ro bucket bucket && exec \"$@\"' --", words)
    };
    let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let model = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), b"x"].concat();
    std::fs::write(scratch.folder("hub").join("model.safetensors"), model).expect("a model");
    let outcome = fixed(&format!("ckpt convert hf:hub {source}"));
    outcome.failed_with(&format!("{source}: Read-only file system"), "`findmnt -T`");
    for words in [format!("mount {source} {}", mnt.display()), format!("fsck {source}")] {
        fixed(&words)
            .failed_with("bucket/.forebay/volume.lock: Read-only file system", "mount it with --read-only");
    }
}

/// A prefix that was misspelt is no error, since nothing may lie there yet; that nothing does is said.
#[test]
fn commands_that_find_nothing_say_so() {
    let scratch = Scratch::new();
    let (source, cache) = (url(&scratch.folder("bucket")), scratch.join("cache").display().to_string());
    for (line, told) in [
        (&["warmup", &source, "--cache-dir", &cache][..], "holds no files: nothing was warmed"),
        (&["ckpt", "ls", &source], "holds no checkpoints"),
        (&["ckpt", "gc", &source], "holds no checkpoints"),
    ] {
        let outcome = forebay(&scratch, line);
        assert!(outcome.stderr.contains(&format!("warning: {source} {told}")), "{outcome}");
        outcome.succeeded();
    }
    // What is waited for may have been misspelt as well.
    for place in [&source, &url(&scratch.join("absent"))] {
        let outcome = forebay(&scratch, &["ckpt", "watch", place, "--timeout", "1", "--interval", "1"]);
        let told = format!("warning: {place} holds no checkpoints: the first is waited for");
        assert_eq!(outcome.stderr.matches(&told).count(), 1, "{outcome}");
        outcome.failed_with("no step was committed", "--timeout");
    }
}

/// Their files would be files of the volume.
#[test]
fn directories_of_a_mount_that_lie_in_the_bucket_are_refused() {
    let scratch = Scratch::new();
    let (bucket, mnt) = (scratch.folder("bucket"), scratch.folder("mnt"));
    let (source, mnt) = (url(&bucket), mnt.display().to_string());
    std::os::unix::fs::symlink(&bucket, scratch.join("link")).expect("a link");
    let places = [bucket.clone(), bucket.join("not/there/yet"), scratch.join("link/cache")];
    for place in places.map(|place| place.display().to_string()) {
        for line in [
            &["mount", &source, &mnt, "--cache-dir", &place][..],
            &["mount", &source, &mnt, "--state-dir", &place],
            &["mount", &source, &mnt, "-o", &format!("state_dir={place}")],
            &["warmup", &source, "--cache-dir", &place],
            &["warmup", &source, "--cache-dir", &mnt, "--state-dir", &place],
            &["fsck", &source, "--state-dir", &place],
            &["gc", &source, "--state-dir", &place],
        ] {
            forebay(&scratch, line).failed_with("lies in the bucket's directory", "outside of it");
        }
    }
    // The cache removes what it does not know, and one directory below it is called so.
    let within = scratch.folder("cache/v1");
    let (above, within) = (scratch.join("cache").display().to_string(), url(&within));
    std::fs::write(scratch.join("cache/v1/file"), "kept").expect("a file of the bucket");
    for line in
        [&["mount", &within, &mnt, "--cache-dir", &above][..], &["warmup", &within, "--cache-dir", &above]]
    {
        forebay(&scratch, line).failed_with("lies in the cache directory", "holds nothing else");
    }
    assert!(scratch.join("cache/v1/file").exists());
    // A mount that is served from within itself would wait for itself.
    let within = format!("{mnt}/cache");
    for option in ["--cache-dir", "--state-dir"] {
        forebay(&scratch, &["mount", &source, &mnt, option, &within])
            .failed_with("lies in the mount point", "outside of it");
    }
    assert_eq!(std::fs::read_dir(&bucket).expect("a folder").count(), 0, "a refused mount makes nothing");
}

#[test]
fn mount_points_that_are_none() {
    if !require_fuse("mount_points_that_are_none") {
        return;
    }
    let scratch = Scratch::new();
    let source = url(&scratch.folder("bucket"));
    let missing = scratch.join("missing").display().to_string();
    forebay(&scratch, &["mount", &source, &missing]).failed_with("missing", "mkdir");
    let file = scratch.join("file");
    std::fs::write(&file, "kept").expect("the scratch folder is writable");
    forebay(&scratch, &["mount", &source, &file.display().to_string()]).failed_with("not a directory", "");
    assert_eq!(std::fs::read_to_string(&file).expect("the file is still there"), "kept");
    // A mount on the bucket's own directory waits for itself, one within it has no end.
    let (inner, above) = (scratch.folder("bucket/inner"), scratch.path().to_owned());
    std::os::unix::fs::symlink(&inner, scratch.join("link")).expect("a link");
    for place in [scratch.join("bucket"), inner.clone(), above, scratch.join("link"), inner.join("..")] {
        forebay(&scratch, &["mount", &source, &place.display().to_string()])
            .failed_with("lie in one another", "outside of the bucket's directory");
    }
    std::fs::remove_dir(&inner).expect("nothing was mounted");
    let mut mount = Mount::new(&scratch.join("home"), &source, &scratch.join("mnt"), &[], &[]);
    std::fs::write(mount.path().join("before"), "kept").expect("the mount is writable");
    let other = url(&scratch.folder("other-bucket"));
    let busy = mount.path().display().to_string();
    forebay(&scratch, &["mount", &other, &busy]).failed_with("already", "umount");
    assert_eq!(std::fs::read_to_string(mount.path().join("before")).expect("still mounted"), "kept");
    mount.unmount();
}

/// Promise S8: One prefix has one read-write mount: a second one is refused and says who holds it.
#[test]
fn a_second_read_write_mount_is_refused() {
    if !require_fuse("a_second_read_write_mount_is_refused") {
        return;
    }
    let scratch = Scratch::new();
    let source = url(&scratch.folder("bucket"));
    let mut mount = Mount::new(&scratch.join("home"), &source, &scratch.join("mnt"), &[], &[]);
    std::fs::write(mount.path().join("first"), "kept").expect("the mount is writable");
    let second = scratch.folder("second").display().to_string();
    let outcome = Forebay::new(&scratch.folder("other-home"), ["mount", &source, &second]).run();
    outcome.failed_with("mounted read-write by", "unmount");
    std::fs::write(mount.path().join("second"), "kept").expect("the first mount still serves");
    mount.unmount();
    mount.remount(&scratch.join("other-home"));
    for name in ["first", "second"] {
        assert_eq!(std::fs::read_to_string(mount.path().join(name)).expect(name), "kept");
    }
    mount.unmount();
}

#[test]
fn no_fuse_device() {
    let scratch = Scratch::new();
    let (bucket, mnt) = (scratch.folder("bucket"), scratch.folder("mnt"));
    let allowed = shell(scratch.path(), "unshare --mount true");
    if allowed.code != Some(0) {
        return forebay_tests::settings::skip("no_fuse_device", "mount namespaces need root");
    }
    let program = Forebay::binary();
    let outcome = shell(
        scratch.path(),
        &format!(
            "unshare --mount bash -c 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && exec {} mount {} {}'",
            program.display(),
            url(&bucket),
            mnt.display()
        ),
    );
    outcome.failed_with("/dev/fuse", "fuse");
}

#[test]
fn a_damaged_state_directory_loses_nothing() {
    if !require_fuse("a_damaged_state_directory_loses_nothing") {
        return;
    }
    let scratch = Scratch::new();
    let (source, home) = (url(&scratch.folder("bucket")), scratch.folder("home"));
    let mut mount = Mount::new(&home, &source, &scratch.join("mnt"), &[], &[]);
    std::fs::write(mount.path().join("file"), "kept").expect("the mount is writable");
    mount.unmount();
    let damage = "find . -type f -not -name '*.log' -exec sh -c 'printf damaged > \"$1\"' _ {} \\;";
    shell(&home, damage).succeeded();
    mount.remount(&home);
    assert_eq!(std::fs::read_to_string(mount.path().join("file")).expect("file"), "kept");
    mount.unmount();
}
