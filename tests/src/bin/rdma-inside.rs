//! What network cards that read each other's memory do, tried out in a machine that has two (`tests/tests/rdma.rs`).
#![allow(clippy::print_stdout, reason = "it is how the test hears of it")]

use std::process::Command;
use std::sync::Arc;
use std::thread::scope;
use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_io::net::{BulkReceiver, BulkSender, Door, Label, Message, Rdma};
use forebay_tests::noise;
use forebay_tests::process::output;
use rand::SeedableRng;
use rand::rngs::SmallRng;

const PATIENCE: Duration = Duration::from_secs(60);
const PIECE: usize = 1 << 20;
/// Bytes that are read to try a way out.
const TRIAL: u64 = 64;

const SCENARIOS: &[(&str, fn())] = &[
    ("cards are found and named", cards_are_found),
    ("lent pieces are read from where they lie", lent_pieces_are_read),
    ("pieces that are not lent are sent", pieces_that_are_not_lent_are_sent),
    ("what cannot be read into comes again", what_cannot_be_read_into_comes_again),
    ("what is lent no more comes again", what_is_lent_no_more_comes_again),
    ("one card is no way", one_card_is_no_way),
    ("who is gone reads nothing", who_is_gone_reads_nothing),
    ("many ways at once", many_ways_at_once),
    ("a link that is lost costs no byte", a_link_that_is_lost_costs_no_byte),
];

fn main() {
    for (name, scenario) in SCENARIOS {
        scenario();
        println!("passed: {name}");
    }
    println!("{} scenarios passed", SCENARIOS.len());
}

fn card(name: &str) -> Arc<Rdma> {
    Rdma::open(&name.parse().expect("a name"), 0).expect("open").expect("a card")
}

/// Two cards of this machine, and one way between them.
struct Site {
    sender: BulkSender,
    receiver: BulkReceiver,
    cards: [Option<Arc<Rdma>>; 2],
}

impl Site {
    fn new() -> Self {
        Self::with([Some(card("rxe0")), Some(card("rxe1"))])
    }

    fn with(cards: [Option<Arc<Rdma>>; 2]) -> Self {
        let door = Door::open("secret".into()).expect("a port");
        let (port, here) = (door.port().expect("a port"), ["127.0.0.1".to_owned()]);
        let (sender, mut came) = scope(|scope| {
            let sender = scope.spawn(|| {
                BulkSender::connect(&here, port, "secret", 7, PATIENCE, cards[0].as_ref()).expect("there")
            });
            let came = BulkReceiver::welcome(&door, 1, PATIENCE, cards[1].as_ref()).expect("welcome");
            (sender.join().expect("join"), came)
        });
        let (from, receiver) = came.pop().expect("one came");
        assert_eq!(from, 7);
        assert_eq!(sender.is_direct(), receiver.is_direct());
        Self { sender, receiver, cards }
    }

    fn cards(&self) -> [&Arc<Rdma>; 2] {
        self.cards.each_ref().map(|card| card.as_ref().expect("a card"))
    }

    /// Bytes that were read by the card of who receives, but for the trial.
    fn read(&self) -> u64 {
        self.cards()[1].bytes_read() - TRIAL
    }
}

/// Takes so many pieces; gives how many had to come again.
fn take(receiver: &mut BulkReceiver, into: &mut [&mut [u8]], count: usize) -> usize {
    let (mut left, mut again) = (count, 0);
    while left > 0 {
        match receiver.hear().expect("a message") {
            Message::Beat => {}
            Message::Piece(label, length) => {
                let piece = &mut into[label[0] as usize];
                assert_eq!(piece.len(), length);
                match receiver.fill(piece).expect("fill") {
                    true => left -= 1,
                    false => again += 1,
                }
            }
            Message::GaveUp(_) => panic!("nobody gave up"),
        }
    }
    again
}

fn take_all(receiver: &mut BulkReceiver, into: &mut [u8]) -> usize {
    let mut pieces: Vec<_> = into.chunks_mut(PIECE).collect();
    let count = pieces.len();
    take(receiver, &mut pieces, count)
}

fn content(pieces: usize, seed: u64) -> Vec<u8> {
    noise(&mut SmallRng::seed_from_u64(seed), pieces * PIECE)
}

fn label(number: usize) -> Label {
    [number as u32, 0, 0, 0]
}

fn send_all<'p>(sender: &BulkSender, pieces: impl Iterator<Item = &'p [u8]>) {
    let mut sending = sender.sending();
    for (number, piece) in pieces.enumerate() {
        sending.send(label(number), piece).expect("send");
    }
    sending.end().expect("all are there");
}

fn cards_are_found() {
    assert!(Rdma::open(&"off".parse().expect("a word"), 0).expect("none is wanted").is_none());
    let found: Vec<String> = (0..3)
        .map(|number| {
            Rdma::open(&"auto".parse().expect("a word"), number).expect("open").expect("a card").to_string()
        })
        .collect();
    assert_eq!(found[0], found[2], "they take turns");
    assert!(
        found.contains(&"rxe0:1 (RoCE)".to_owned()) && found.contains(&"rxe1:1 (RoCE)".to_owned()),
        "{found:?}"
    );
    let error = Rdma::open(&"mlx5_9".parse().expect("a name"), 0).expect_err("there is none");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("mlx5_9") && error.to_string().contains("rxe0"), "{error}");
}

fn lent_pieces_are_read() {
    let mut site = Site::new();
    assert!(site.sender.is_direct());
    let whole = content(32, 1);
    let (mut from, mut into) = (whole.clone(), vec![0; whole.len()]);
    let (from, mut into) = ([&mut from[..]], [&mut into[..]]);
    let _lent = site.cards()[0].lend(&from).expect("lend");
    let _room = site.cards()[1].lend(&into).expect("lend");
    scope(|scope| {
        let (sender, receiver) = (&site.sender, &mut site.receiver);
        scope.spawn(|| send_all(sender, from[0].chunks(PIECE)));
        assert_eq!(take_all(receiver, into[0]), 0);
    });
    assert!(*into[0] == whole);
    assert_eq!(site.read(), whole.len() as u64, "not a byte over TCP");
    assert!(site.sender.is_direct() && site.receiver.is_direct());
}

fn pieces_that_are_not_lent_are_sent() {
    let mut site = Site::new();
    let whole = content(8, 2);
    let (mut from, mut into) = (whole.clone(), vec![0; whole.len()]);
    let (first, second) = from.split_at_mut(4 * PIECE);
    let mut into = [&mut into[..]];
    let lent = [first];
    let _lent = site.cards()[0].lend(&lent).expect("lend");
    let _room = site.cards()[1].lend(&into).expect("lend");
    scope(|scope| {
        let (sender, receiver, second) = (&site.sender, &mut site.receiver, &*second);
        scope.spawn(|| send_all(sender, lent[0].chunks(PIECE).chain(second.chunks(PIECE))));
        assert_eq!(take_all(receiver, into[0]), 0);
    });
    assert!(*into[0] == whole);
    assert_eq!(site.read(), 4 * PIECE as u64);
    assert!(site.sender.is_direct(), "the next may be lent again");
}

fn what_cannot_be_read_into_comes_again() {
    let mut site = Site::new();
    let whole = content(20, 3);
    let (mut from, mut into) = (whole.clone(), vec![0; whole.len()]);
    let from = [&mut from[..]];
    let _lent = site.cards()[0].lend(&from).expect("lend");
    let again = scope(|scope| {
        let (sender, receiver) = (&site.sender, &mut site.receiver);
        scope.spawn(|| send_all(sender, from[0].chunks(PIECE)));
        take_all(receiver, &mut into)
    });
    assert!(into == whole && (1..=16).contains(&again), "{again} came again");
    assert_eq!(site.read(), 0);
    assert!(!site.sender.is_direct() && !site.receiver.is_direct(), "all that follows is sent");
    assert!(site.receiver.trouble().is_some_and(|trouble| trouble.to_string().contains("not lent")));
}

fn what_is_lent_no_more_comes_again() {
    let mut site = Site::new();
    let whole = content(4, 4);
    let (mut from, mut into) = (whole.clone(), vec![0; whole.len()]);
    let (from, mut into) = ([&mut from[..]], [&mut into[..]]);
    let lent = site.cards()[0].lend(&from).expect("lend");
    let _room = site.cards()[1].lend(&into).expect("lend");
    let mut sending = site.sender.sending();
    for (number, piece) in from[0].chunks(PIECE).enumerate() {
        sending.send(label(number), piece).expect("send");
    }
    drop(lent);
    let again = scope(|scope| {
        let receiver = &mut site.receiver;
        scope.spawn(|| sending.end().expect("all are there"));
        take_all(receiver, into[0])
    });
    assert!(*into[0] == whole && again == 4, "{again} came again");
    assert_eq!(site.cards()[1].bytes_read(), TRIAL);
    assert!(
        site.receiver.trouble().is_some_and(|trouble| trouble.to_string().contains("remote access error"))
    );
}

fn one_card_is_no_way() {
    for cards in [[Some(card("rxe0")), None], [None, Some(card("rxe1"))], [None, None]] {
        let mut site = Site::with(cards);
        assert!(!site.sender.is_direct() && !site.receiver.is_direct());
        let (whole, mut into) = (content(2, 5), vec![0; 2 * PIECE]);
        scope(|scope| {
            let (sender, receiver) = (&site.sender, &mut site.receiver);
            scope.spawn(|| send_all(sender, whole.chunks(PIECE)));
            assert_eq!(take_all(receiver, &mut into), 0);
        });
        assert!(into == whole);
    }
}

fn who_is_gone_reads_nothing() {
    let Site { sender, receiver, cards } = Site::new();
    let mut from = content(1, 6);
    let from = [&mut from[..]];
    let _lent = cards[0].as_ref().expect("a card").lend(&from).expect("lend");
    let mut sending = sender.sending();
    sending.send(label(0), from[0]).expect("send");
    drop(receiver);
    assert_eq!(sending.end().expect_err("nobody answers").kind(), ErrorKind::Unavailable);
    assert!(!sender.is_direct());
    assert_eq!(sender.give_up(label(0)).expect_err("closed").kind(), ErrorKind::Unavailable);
}

fn many_ways_at_once() {
    const WAYS: usize = 8;
    let mut sites: Vec<Site> = (0..WAYS).map(|_| Site::new()).collect();
    scope(|scope| {
        for (number, site) in sites.iter_mut().enumerate() {
            scope.spawn(move || {
                let whole = content(4, 10 + number as u64);
                let (mut from, mut into) = (whole.clone(), vec![0; whole.len()]);
                let (from, mut into) = ([&mut from[..]], [&mut into[..]]);
                let _lent = site.cards()[0].lend(&from).expect("lend");
                let _room = site.cards()[1].lend(&into).expect("lend");
                std::thread::scope(|scope| {
                    let (sender, receiver) = (&site.sender, &mut site.receiver);
                    scope.spawn(|| send_all(sender, from[0].chunks(PIECE)));
                    assert_eq!(take_all(receiver, into[0]), 0);
                });
                assert!(*into[0] == whole, "way {number}");
            });
        }
    });
    assert!(sites.iter().all(|site| site.read() == 4 * PIECE as u64));
}

/// Last: it takes the link away.
fn a_link_that_is_lost_costs_no_byte() {
    let mut site = Site::new();
    let whole = content(12, 7);
    let (mut from, mut into) = (whole.clone(), vec![0; whole.len()]);
    let (from, mut into) = ([&mut from[..]], [&mut into[..]]);
    let _lent = site.cards()[0].lend(&from).expect("lend");
    let _room = site.cards()[1].lend(&into).expect("lend");
    let again = scope(|scope| {
        let (sender, receiver) = (&site.sender, &mut site.receiver);
        scope.spawn(|| send_all(sender, from[0].chunks(PIECE)));
        let mut pieces: Vec<_> = into[0].chunks_mut(PIECE).collect();
        assert_eq!(take(receiver, &mut pieces, 4), 0);
        let ip = std::env::var("ip").expect("the machine says where it is");
        let cut = output(Command::new(ip).args(["link", "set", "v1", "down"])).expect("ip");
        assert!(cut.status.success());
        take(receiver, &mut pieces, 8)
    });
    assert!(*into[0] == whole && again > 0, "{again} came again");
    assert!(!site.sender.is_direct() && !site.receiver.is_direct());
    // Nor is there a way any more, which is found out by trying it.
    let mut site = Site::with(site.cards.clone());
    assert!(!site.sender.is_direct());
    let mut into = vec![0; whole.len()];
    scope(|scope| {
        let (sender, receiver) = (&site.sender, &mut site.receiver);
        scope.spawn(|| send_all(sender, whole.chunks(PIECE)));
        assert_eq!(take_all(receiver, &mut into), 0);
    });
    assert!(into == whole);
}
