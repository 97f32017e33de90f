//! What becomes of names that change without the kernel having asked for it.

use super::*;

/// Promise S35: What `forebay refresh` finds in the bucket, and what `forebay clone` makes, is seen at once through the
/// mount, however long the kernel may keep names.
#[test]
fn outside_changes_are_seen_at_once_after_a_refresh() {
    if !require_fuse("outside_changes_are_seen_at_once_after_a_refresh") {
        return;
    }
    let walk = Walk::with(&["-o", "ttl=3600"], |bucket| {
        std::fs::create_dir(bucket.join("d")).expect("a folder");
        for name in ["replaced", "removed", "d/below"] {
            std::fs::write(bucket.join(name), name).expect("an object");
        }
    });
    let (mount, bucket) = (walk.mount.path().to_owned(), walk.scratch.join("bucket"));
    let shown =
        |name: &str| std::fs::read_to_string(mount.join(name)).unwrap_or_else(|error| error.to_string());
    for name in ["replaced", "removed", "d/below"] {
        assert_eq!(shown(name), name);
    }
    assert!(shown("new").contains("No such file") && shown("d/clone").contains("No such file"));
    std::fs::write(bucket.join("replaced"), "another text").expect("an object");
    std::fs::write(bucket.join("new"), "new").expect("an object");
    std::fs::remove_file(bucket.join("removed")).expect("an object");
    assert_eq!(shown("removed"), "removed", "the kernel keeps names for an hour");
    let home = walk.scratch.join("home");
    Forebay::new(&home, ["refresh".as_ref(), mount.as_os_str()]).run().succeeded();
    let (from, to) = (mount.join("new"), mount.join("d/clone"));
    Forebay::new(&home, ["clone".as_ref(), from.as_os_str(), to.as_os_str()]).run().succeeded();
    assert!(shown("removed").contains("No such file"));
    assert_eq!(shown("d/clone"), "new");
    assert_eq!((shown("replaced").as_str(), shown("new").as_str()), ("another text", "new"));
    let mut names: Vec<_> =
        std::fs::read_dir(&mount).expect("a listing").flatten().map(|e| e.file_name()).collect();
    names.sort();
    assert_eq!(names, ["d", "new", "replaced"]);
}

/// Notifications and requests in the same directories, all at once: none waits for the other for ever.
#[test]
fn a_storm_of_notifications_stops_no_request() {
    if !require_fuse("a_storm_of_notifications_stops_no_request") {
        return;
    }
    let mut walk =
        Walk::with(&["-o", "ttl=3600"], |bucket| std::fs::create_dir(bucket.join("d")).expect("a folder"));
    let (mount, bucket) = (walk.mount.path().to_owned(), walk.scratch.join("bucket"));
    let home = walk.scratch.join("home");
    let running = std::sync::atomic::AtomicBool::new(true);
    let rounds = 20 * scale();
    std::thread::scope(|scope| {
        let (mount, running) = (&mount, &running);
        let busy: Vec<_> = (0..4)
            .map(|worker| {
                scope.spawn(move || {
                    let mut done = 0_u64;
                    while running.load(std::sync::atomic::Ordering::Relaxed) {
                        let own = mount.join(format!("d/own-{worker}-{}", done % 7));
                        std::fs::write(&own, format!("{done}")).expect("written");
                        // Objects of the storm come and go; that they can be asked for is what matters.
                        for number in 0..30 {
                            let _ = std::fs::metadata(mount.join(format!("d/storm-{number}")));
                        }
                        assert!(std::fs::read_dir(mount.join("d")).expect("a listing").flatten().count() > 0);
                        let renamed = mount.join(format!("d/renamed-{worker}"));
                        std::fs::rename(&own, &renamed).expect("renamed");
                        assert_eq!(std::fs::read_to_string(&renamed).expect("read"), format!("{done}"));
                        std::fs::remove_file(&renamed).expect("removed");
                        done += 1;
                    }
                    done
                })
            })
            .collect();
        for round in 0..rounds {
            for number in 0..30 {
                let object = bucket.join(format!("d/storm-{number}"));
                match (round + number) % 3 {
                    0 => drop(std::fs::remove_file(&object)),
                    _ => std::fs::write(&object, format!("{round}")).expect("an object"),
                }
            }
            let directory = mount.join("d");
            Forebay::new(&home, ["refresh".as_ref(), directory.as_os_str()]).run().succeeded();
        }
        running.store(false, std::sync::atomic::Ordering::Relaxed);
        for worker in busy {
            assert!(worker.join().expect("a worker ends") > 0, "every worker got on");
        }
    });
    walk.mount.unmount();
}
