//! What ranks hear of each other, and who is named.

use forebay_io::rng::Rng;

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

fn name(test: &str) -> String {
    format!("forebay-test-{test}-{}", std::process::id())
}

/// Text that cannot be made much shorter, another one for each rank.
fn noise(rank: usize, bytes: usize) -> String {
    let rng = Rng::seeded(rank as u64);
    (0..bytes.div_ceil(32)).map(|_| rng.name()).collect()
}

/// Runs `work` on each rank of a group, each on a thread of its own.
fn on_ranks<T: Send>(test: &str, count: usize, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let run = |rank| {
        work(Group::join(Way::Name(&name(test)), rank, count, "here", PATIENCE, &mut || true).expect("join"))
    };
    let run = &run;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..count).map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("rank")).collect()
    })
}

#[test]
fn all_hear_all_in_order() {
    let heard = on_ranks("all", 4, |mut group| {
        let say = |group: &mut Group, round| {
            let text = format!("{} in {round}", group.rank());
            group.gather(&text, PATIENCE, &mut || true).expect("gather")
        };
        (say(&mut group, 1), say(&mut group, 2))
    });
    for (first, second) in heard {
        assert_eq!(first, ["0 in 1", "1 in 1", "2 in 1", "3 in 1"]);
        assert_eq!(second, ["0 in 2", "1 in 2", "2 in 2", "3 in 2"]);
    }
}

#[test]
fn all_see_the_memory_of_all() {
    let seen = on_ranks("memory", 3, |mut group| {
        let memory = SharedMemory::create("test", 4096).expect("memory");
        memory.map_write(0..4096).expect("map")[7] = 10 + group.rank() as u8;
        let lent = group.exchange(&memory, PATIENCE, &mut || true).expect("exchange");
        let seen: Vec<u8> =
            lent.iter().map(|memory| memory.map_read(0..4096).expect("map").as_ref()[7]).collect();
        (seen, group.gather("and on", PATIENCE, &mut || true).expect("gather").len())
    });
    assert_eq!(seen, vec![(vec![10, 11, 12], 3); 3]);
    let refused = on_ranks("miser", 2, |mut group| match group.rank() {
        0 => group
            .exchange(&SharedMemory::create("test", 4096).expect("memory"), PATIENCE, &mut || true)
            .is_err(),
        _ => group.gather("nothing to lend", PATIENCE, &mut || true).is_ok(),
    });
    assert_eq!(refused, [true, true]);
}

#[test]
fn all_know_where_all_are_and_lend_memory_on_one_host_only() {
    let name = name("hosts");
    let heard: Vec<_> = std::thread::scope(|scope| {
        let join = |(rank, host)| {
            let mut group =
                Group::join(Way::Name(&name), rank, 3, host, PATIENCE, &mut || true).expect("join");
            let memory = SharedMemory::create("test", 4096).expect("memory");
            let refused = group.exchange(&memory, PATIENCE, &mut || true).expect_err("two hosts");
            // And goes on.
            let heard = group.gather("on", PATIENCE, &mut || true).expect("gather").concat();
            (group.hosts().to_vec(), refused.to_string(), heard)
        };
        let ranks: Vec<_> = [(0, "one"), (1, "one"), (2, "other")]
            .map(|place| scope.spawn(move || join(place)))
            .into_iter()
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("rank")).collect()
    });
    for (hosts, refused, said) in heard {
        assert_eq!((hosts, said.as_str()), (vec!["one".into(), "one".into(), "other".into()], "ononon"));
        assert!(refused.contains("rank 2 is on another host than rank 0"), "{refused}");
    }
}

#[test]
fn ranks_of_other_hosts_come_through_a_door() {
    let (name, secret) = (name("door"), "ab".repeat(32));
    let door = Door::open(secret.clone()).expect("a port");
    let port = door.port().expect("port");
    let come = || {
        let addresses = ["127.0.0.1".to_owned()];
        forebay_io::net::come(&addresses, port, &secret, PATIENCE)
    };
    let join = |way, rank, host| Group::join(way, rank, 3, host, PATIENCE, &mut || true).expect("join");
    let talk = |mut group: Group| {
        let long = "x".repeat(MOST_BYTES / 4);
        let heard = group.gather(&long, PATIENCE, &mut || true).expect("gather");
        assert_eq!(heard, vec![long; 3]);
        let hosts = group.hosts().to_vec();
        if group.rank() == 1 {
            return hosts;
        }
        let gone = group.gather("", PATIENCE, &mut || true).expect_err("rank 1 is gone");
        assert!(gone.message().contains("rank 1 of the job is gone"), "{gone}");
        hosts
    };
    let hosts: Vec<_> = std::thread::scope(|scope| {
        let first = scope.spawn(|| talk(join(Way::Open(&name, door), 0, "one")));
        let far = scope.spawn(|| talk(join(Way::Came(come().expect("a door")), 1, "other")));
        let near = scope.spawn(|| talk(join(Way::Name(&name), 2, "one")));
        [first, far, near].into_iter().map(|rank| rank.join().expect("rank")).collect()
    });
    assert_eq!(hosts, vec![["one", "other", "one"]; 3]);
    assert!(come().is_none(), "the door is shut once all are there");
}

#[test]
fn a_rank_that_is_gone_or_silent_is_named() {
    let errors = on_ranks("gone", 3, |mut group| match group.rank() {
        2 => None,
        _ => Some(group.gather("", PATIENCE, &mut || true).expect_err("rank 2 is gone")),
    });
    for error in errors.into_iter().flatten() {
        assert!(error.message().contains("rank 2 of the job is gone"), "{error}");
    }
    let told = std::sync::Barrier::new(3);
    let errors = on_ranks("silent", 3, |mut group| {
        if group.rank() == 0 {
            let error =
                group.gather("", Duration::from_millis(50), &mut || true).expect_err("others are silent");
            assert!(error.message().contains("ranks 1, 2 did not take part within 0.05 s"), "{error}");
        }
        told.wait();
        group.gather("", PATIENCE, &mut || true).expect_err("it is over")
    });
    assert!(errors.iter().all(|error| error.kind() == ErrorKind::Unavailable));
}

#[test]
fn a_wait_is_ended_where_it_is_not_to_go_on_and_the_others_hear_so() {
    let errors = on_ranks("ended", 3, |mut group| match group.rank() {
        // It says nothing until it is told that the group is over.
        2 => vec![heard_of_the_end(&mut group)],
        1 => {
            let mut asked = 0;
            let mut twice = || {
                asked += 1;
                asked < 2
            };
            let error = group.gather("", PATIENCE, &mut twice).expect_err("ended");
            vec![error, group.gather("", PATIENCE, &mut || true).expect_err("it is over")]
        }
        _ => vec![group.gather("", PATIENCE, &mut || true).expect_err("rank 1 is gone")],
    });
    let messages: Vec<Vec<_>> =
        errors.iter().map(|errors| errors.iter().map(Error::message).collect()).collect();
    let gone = "rank 1 of the job is gone";
    let own = ["the wait for the job's other ranks was ended here", "the job's group is over"];
    assert_eq!(messages, [vec![gone], own.to_vec(), vec![gone]]);
    let error = Group::join(Way::Name(&name("nobody")), 1, 2, "here", PATIENCE, &mut || false)
        .expect_err("rank 0 never comes");
    assert_eq!(error.message(), own[0]);
    let error = Group::join(Way::Name(&name("crowd")), 1, 65_537, "here", PATIENCE, &mut || false)
        .expect_err("too many");
    assert_eq!((error.kind(), error.message()), (ErrorKind::Invalid, "65537 ranks, more than 65536"));
}

fn heard_of_the_end(group: &mut Group) -> Error {
    assert!(group.stream.as_ref().expect("a stream").readable(PATIENCE).expect("readable"));
    group.gather("", PATIENCE, &mut || true).expect_err("it is over")
}

/// What a socket does not take at once: a rank that said its word and does not read keeps nobody from the others' words, and is
/// named.
#[test]
fn a_rank_that_takes_no_answer_is_named_and_holds_nobody_up() {
    const BRIEF: Duration = Duration::from_secs(1);
    let over = std::sync::Barrier::new(3);
    let heard = on_ranks("stuck", 3, |mut group| {
        let word = noise(group.rank(), MOST_BYTES / 4);
        let heard = match group.rank() {
            2 => {
                let word = word_of(2, &word, 1_000).expect("a word");
                group.stream.as_mut().expect("a stream").send_while(&word, None, &mut || true).expect("send");
                None
            }
            _ => {
                let all = group.gather(&word, BRIEF, &mut || true).expect("the others' words");
                assert_eq!(all.concat().len(), 3 * word.len());
                Some(group.gather("", PATIENCE, &mut || true).expect_err("it is over").to_string())
            }
        };
        over.wait();
        heard
    });
    for error in heard.into_iter().flatten() {
        assert!(error.contains("rank 2 did not take the answer within 1 s"), "{error}");
    }
}

/// A rank that stops in the middle of its word, before the other says its own or after.
#[test]
fn a_rank_that_says_half_a_word_is_named() {
    for is_first in [true, false] {
        // Two ranks: a third one would have no longer than the bad one from the first word on.
        let (said, over) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        let heard = on_ranks(if is_first { "half" } else { "last-half" }, 2, |mut group| {
            let half = |group: &Group| {
                let stream = group.stream.as_ref().expect("a stream").as_fd().try_clone_to_owned();
                let stream = std::os::unix::net::UnixStream::from(stream.expect("clone"));
                // The length of a frame, and nothing of it.
                std::io::Write::write_all(&mut &stream, &[9, 0, 0, 0, b'{']).expect("write");
            };
            let is_half = group.rank() == 1;
            if is_half && is_first {
                half(&group);
            }
            said.wait();
            let heard = match is_half {
                true if is_first => None,
                true => {
                    half(&group);
                    None
                }
                false => {
                    let brief = Duration::from_secs(1);
                    Some(group.gather("", brief, &mut || true).expect_err("no word").to_string())
                }
            };
            over.wait();
            heard
        });
        for error in heard.into_iter().flatten() {
            assert!(error.contains("rank 1 did not take part within 1 s"), "{error}");
        }
    }
}

/// The ranks waited for each other, and heard in the end that rank 0 did not answer.
#[test]
fn ranks_that_say_too_much_hear_so_at_once() {
    // Each alone fits; and one that does not fit alone, while the others wait for it.
    for (test, lengths, fact) in [
        ("much", [MOST_BYTES * 2 / 3; 2], "what the ranks tell each other is too long: 139"),
        ("more", [1, MOST_BYTES + 1], "what rank 1 tells the others is too long: 104"),
    ] {
        let errors = on_ranks(test, 2, |mut group| {
            let text = "x".repeat(lengths[group.rank()]);
            let error = group.gather(&text, PATIENCE, &mut || true).expect_err("too long");
            (error, group.gather("", PATIENCE, &mut || true).expect_err("it is over"))
        });
        for (error, after) in errors {
            assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
            assert!(error.message().contains(fact), "{error}");
            assert!(after.message().contains("is over"), "{after}");
        }
    }
    let longest = on_ranks("longest", 2, |mut group| {
        let text = "x".repeat(MOST_BYTES / 2 - 100);
        group.gather(&text, PATIENCE, &mut || true).expect("it fits").concat().len()
    });
    assert_eq!(longest, [MOST_BYTES - 200; 2]);
}

#[test]
fn ranks_that_do_not_come_are_named_and_twins_are_refused() {
    // Rank 0 is there even where nobody is waited for.
    let error = Group::join(Way::Name(&name("alone")), 0, 3, "here", Duration::ZERO, &mut || true)
        .expect_err("alone");
    assert!(error.message().contains("ranks 1, 2 did not join"), "{error}");
    // Many times, since the twins may be there before rank 0 looks, or after.
    for round in 0..20 {
        let name = name(&format!("twins-{round}"));
        std::thread::scope(|scope| {
            let join = |rank| {
                let error = Group::join(Way::Name(&name), rank, 3, "here", PATIENCE, &mut || true)
                    .expect_err("twins");
                assert!(error.message().contains("two processes say that they are rank 1"), "{error}");
            };
            [0, 1, 1].into_iter().for_each(|rank| drop(scope.spawn(move || join(rank))));
        });
    }
}

/// A process that is out of descriptors gets the frame and not what was lent with it. What was left to be read was taken for the
/// words of the next round.
#[test]
fn a_lent_descriptor_that_does_not_arrive_ends_the_group() {
    let (own, mut other) = FdStream::pair().expect("a pair");
    let hosts = vec!["here".to_owned(); 2];
    let mut group = Group { rank: 0, hosts, stream: Some(own), ends: Arc::new(Inherited::new()) };
    let memory = SharedMemory::create("test", 4096).expect("memory");
    let answer = frame_of(&Answer::All(vec!["lend".into(); 2], 2)).expect("a frame");
    other.send(&answer, None).expect("send");
    for _ in 0..2 {
        other.send(&[], None).expect("send");
    }
    let error = group.exchange(&memory, PATIENCE, &mut || true).expect_err("nothing was lent");
    let told = (error.kind(), error.message().contains("did not arrive"), error.hint().is_some());
    assert_eq!(told, (ErrorKind::Unavailable, true, true), "{error}");
    let error = group.gather("on", PATIENCE, &mut || true).expect_err("it is over");
    assert_eq!(error.message(), "the job's group is over");
}
