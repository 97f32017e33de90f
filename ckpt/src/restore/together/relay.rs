//! Bytes of a round on their way from host to host: each rank passes on what it read, or what comes to it, a piece at a time,
//! while more comes.
//!
//! All know the plan, so that nobody asks for anything: a piece is sent as soon as it is there, and lands where it stays. A
//! way that breaks costs requests to the store, not the restore: who misses a piece reads it there, where that has it, and
//! passes it on. The bytes are checked by each rank that holds them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use forebay_core::{Error, Result};
use forebay_io::clock::Clock;
use forebay_io::net::{BulkReceiver, BulkSender, Door, Label, Lending, Message, Rdma};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::super::{Part, Segment, SliceId};
use super::shares::Placed;
use crate::manifest::Slice;

/// Bytes of a piece: little enough that a hundred hosts in a row wait for a tenth of a second, where each has 10 Gbit/s.
const PIECE: usize = 1 << 20;
/// How long ranks may take to come to each other's ports.
const CONNECTING: Duration = Duration::from_secs(15);
/// How long nothing of a slice may come from one who says that it is there.
const PATIENCE: Duration = Duration::from_secs(300);

/// Where ranks of other hosts come to.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Address {
    /// Names or numbers of the host.
    pub addresses: Vec<String>,
    /// A port there.
    pub port: u16,
    /// What they are to say there.
    pub secret: String,
}

/// The ranks of other hosts that a rank has bytes from, and those that it sends bytes to.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Peers {
    /// Whom it has them from.
    pub from: BTreeSet<usize>,
    /// Whom it sends them to.
    pub to: BTreeSet<usize>,
}

/// A rank's ways to those of other hosts. Each goes once it broke, and is not made again.
#[derive(Debug, Default)]
pub struct Links {
    from: HashMap<usize, Mutex<Option<BulkReceiver>>>,
    to: HashMap<usize, BulkSender>,
    /// The card by which what lies in lent memory is read by others, and this rank reads theirs.
    rdma: Option<Arc<Rdma>>,
    /// Why that is done without.
    trouble: Mutex<Option<Error>>,
}

impl Links {
    /// Goes to the `addresses` of those that `rank` sends to, given for each rank, and waits at its own `door` for those that
    /// send to it. Who does not come, or is not there, has no way. Where both ends have cards that reach each other, bytes go by
    /// these, else over TCP.
    ///
    /// # Errors
    /// What waiting at the door has.
    pub fn connect(
        door: &Door,
        addresses: &[Address],
        rank: usize,
        peers: &Peers,
        rdma: Option<Arc<Rdma>>,
    ) -> Result<Self> {
        let card = rdma.as_ref();
        let go = |to: usize| {
            let Address { addresses, port, secret } = addresses.get(to)?;
            BulkSender::connect(addresses, *port, secret, rank as u32, CONNECTING, card)
        };
        let (came, to) = std::thread::scope(|scope| {
            let going: Vec<_> = peers.to.iter().map(|to| (*to, scope.spawn(move || go(*to)))).collect();
            let came = BulkReceiver::welcome(door, peers.from.len(), CONNECTING, card);
            let went = going.into_iter().filter_map(|(to, way)| Some((to, way.join().ok()??)));
            (came, went.collect())
        });
        let came = came?.into_iter().map(|(from, way)| (from as usize, Mutex::new(Some(way))));
        Ok(Self {
            from: came.filter(|(from, _)| peers.from.contains(from)).collect(),
            to,
            rdma,
            trouble: Mutex::default(),
        })
    }

    /// Of these `peers`, those that there is no way from or to.
    pub fn missing(&self, peers: &Peers) -> BTreeSet<usize> {
        let from = peers.from.iter().filter(|rank| !self.from.contains_key(rank));
        let to = peers.to.iter().filter(|rank| !self.to.contains_key(rank));
        from.chain(to).copied().collect()
    }

    /// How many of the ways go by network cards that read each other's memory, of those that are left.
    pub fn direct(&self) -> usize {
        let from = self.from.values().filter(|way| way.lock().as_ref().is_some_and(BulkReceiver::is_direct));
        from.count() + self.to.values().filter(|way| way.is_direct()).count()
    }

    /// Lends memory to the cards, if bytes go by these.
    pub(super) fn lend<'m>(&self, memory: &[&'m mut [u8]]) -> Option<Lending<'m>> {
        let rdma = self.rdma.as_ref().filter(|_| self.direct() > 0)?;
        rdma.lend(memory).map_err(|error| *self.trouble.lock() = Some(error)).ok()
    }

    /// Why the card did not bring what it was to bring, if there was anything.
    pub fn trouble(&self) -> Option<Error> {
        let of_way = |way: &Mutex<Option<BulkReceiver>>| Some(way.lock().as_ref()?.trouble()?.duplicate());
        let own = self.trouble.lock().as_ref().map(Error::duplicate);
        own.or_else(|| self.from.values().find_map(of_way))
    }

    /// Says to all that this rank sends to that nothing more comes, and takes nothing more of those that send to it, who would wait
    /// for that.
    pub(super) fn give_up(&self) {
        for way in self.to.values() {
            way.give_up([0; 4]).ok();
        }
        self.from.values().for_each(|way| *way.lock() = None);
    }
}

/// A slice in a rank's memory.
pub(super) struct Held<'a> {
    pub placed: Placed,
    pub slice: &'a Slice,
    pub memory: &'a mut [u8],
}

impl<'a> Held<'a> {
    /// Its memory as what is read into.
    pub(super) fn segment(&mut self) -> Segment<'_> {
        let Slice { shard, start, .. } = *self.slice;
        Segment { shard, start, slice: self.placed.slice, target: &mut *self.memory }
    }
}

/// Reads segments, and what one reads them by: nothing, where what other hosts have is to be had there alone.
pub(super) type Read<'r> = &'r (dyn Fn(Vec<Segment<'_>>) -> Result<Vec<Part>> + Sync);

/// What came of a round.
#[derive(Default)]
pub(super) struct Passed {
    /// The checksums of what came, and of what was read in its stead.
    pub parts: Vec<Part>,
    /// Whether all is there; else a rank that was to read some of it failed, or it is to be had nowhere else.
    pub is_whole: bool,
    /// The ranks of which something did not come.
    pub lost: BTreeSet<usize>,
}

/// Pieces on their way to each of the ranks that they go to; none where no more come.
type Ways<'a> = HashMap<usize, Sender<Option<(Label, &'a [u8])>>>;

/// Has `own` read by `read_own`, which checks it; once it is this round's turn passes it on, takes what comes, and passes that on.
/// What does not come is read by `read`, where there is one. Where the turn does not come, nothing is passed.
///
/// # Errors
/// As `read_own` and `read`; the others hear that it does not come.
pub(super) fn pass<'a>(
    links: &Links,
    (round, turn): (usize, &Receiver<()>),
    (mut own, coming): (Vec<Held<'a>>, Vec<Held<'a>>),
    read_own: impl FnOnce(Vec<Segment<'_>>) -> Result<()> + Send,
    read: Option<Read<'_>>,
) -> Result<Passed> {
    let round = round as u32;
    let to: BTreeSet<usize> = own.iter().chain(&coming).filter_map(|held| held.placed.to).collect();
    std::thread::scope(|scope| {
        let reading = scope.spawn(move || (read_own(own.iter_mut().map(Held::segment).collect()), own));
        if turn.recv().is_err() {
            return Ok(Passed::default());
        }
        let mut ways = Ways::new();
        for to in to {
            let (way, pieces) = channel();
            ways.insert(to, way);
            scope.spawn(move || send(links.to.get(&to), round, &pieces));
        }
        let mut of_ranks: BTreeMap<usize, Vec<Held<'a>>> = BTreeMap::new();
        for held in coming {
            if let Some(from) = held.placed.from {
                of_ranks.entry(from).or_default().push(held);
            }
        }
        let receiving = of_ranks.into_iter().map(|(from, held)| {
            let ways = ways.clone();
            (from, scope.spawn(move || receive(links.from.get(&from), round, held, &ways)))
        });
        let receiving: Vec<_> = receiving.collect();
        let (outcome, own) = reading.join().map_err(|_| Error::bug("a reading thread panicked"))?;
        match &outcome {
            Ok(()) => own.into_iter().for_each(|held| pass_on(round, held, &ways)),
            // At once: where all fail, each would wait for the others.
            Err(_) => give_up(&ways),
        }
        let mut passed = Passed { is_whole: true, ..Passed::default() };
        let mut missing = Vec::new();
        for (from, receiving) in receiving {
            let came = receiving.join().map_err(|_| Error::bug("a receiving thread panicked"))?;
            passed.parts.extend(came.parts);
            if !came.missing.is_empty() {
                passed.lost.extend((!came.gave_up).then_some(from));
                passed.is_whole &= !came.gave_up;
                missing.extend((!came.gave_up).then_some(came.missing).into_iter().flatten());
            }
        }
        outcome?;
        match read {
            _ if missing.is_empty() => {}
            Some(read) if passed.is_whole => {
                let read = read(missing.iter_mut().map(Missing::segment).collect());
                passed.parts.extend(read.inspect_err(|_| give_up(&ways))?);
                missing.into_iter().for_each(|piece| piece.pass_on(&ways));
            }
            _ => {
                passed.is_whole = false;
                give_up(&ways);
            }
        }
        Ok(passed)
    })
}

/// Passes on a slice that is all there.
fn pass_on<'a>(round: u32, Held { placed, memory, .. }: Held<'a>, ways: &Ways<'a>) {
    let Some(way) = placed.to.and_then(|to| ways.get(&to)) else { return };
    let memory: &'a [u8] = memory;
    for (number, piece) in memory.chunks(PIECE).enumerate() {
        // It is taken as long as there are ways.
        way.send(Some((label(round, placed.slice, number), piece))).ok();
    }
}

/// Has the ranks behind this one wait for nothing more.
fn give_up(ways: &Ways<'_>) {
    for way in ways.values() {
        way.send(None).ok();
    }
}

fn label(round: u32, slice: SliceId, piece: usize) -> Label {
    [round, slice.0 as u32, slice.1 as u32, piece as u32]
}

/// Sends pieces, until no more come or it is to give up, which it says.
fn send(way: Option<&BulkSender>, round: u32, pieces: &Receiver<Option<(Label, &[u8])>>) {
    let sent = way.map(|way| {
        let mut sending = way.sending();
        for piece in pieces {
            match piece {
                Some((label, piece)) => sending.send(label, piece)?,
                None => {
                    // Nobody takes what would come behind that.
                    way.give_up([round, 0, 0, 0])?;
                    break;
                }
            }
        }
        sending.end()
    });
    // Where the way broke, the other end reads what it misses elsewhere.
    drop(sent);
}

/// A slice that comes in pieces.
struct Coming<'a> {
    placed: Placed,
    slice: &'a Slice,
    /// Those that did not come yet.
    pieces: Vec<Option<&'a mut [u8]>>,
}

/// A piece that did not come.
struct Missing<'a> {
    label: Label,
    to: Option<usize>,
    shard: u32,
    start: u64,
    slice: SliceId,
    memory: &'a mut [u8],
}

impl<'a> Missing<'a> {
    fn segment(&mut self) -> Segment<'_> {
        let Self { shard, start, slice, .. } = *self;
        Segment { shard, start, slice, target: &mut *self.memory }
    }

    fn pass_on(self, ways: &Ways<'a>) {
        if let Some(way) = self.to.and_then(|to| ways.get(&to)) {
            way.send(Some((self.label, self.memory))).ok();
        }
    }
}

/// What came from a rank.
#[derive(Default)]
struct Came<'a> {
    parts: Vec<Part>,
    missing: Vec<Missing<'a>>,
    /// Whether that rank said that the rest does not come.
    gave_up: bool,
}

/// Takes what comes from a rank and passes it on, until all did or nothing more does.
fn receive<'a>(
    way: Option<&Mutex<Option<BulkReceiver>>>,
    round: u32,
    held: Vec<Held<'a>>,
    ways: &Ways<'a>,
) -> Came<'a> {
    let mut coming: HashMap<SliceId, Coming<'a>> = HashMap::new();
    let mut left = 0;
    for Held { placed, slice, memory } in held {
        let pieces: Vec<_> = memory.chunks_mut(PIECE).map(Some).collect();
        left += pieces.len();
        coming.insert(placed.slice, Coming { placed, slice, pieces });
    }
    let mut came = Came::default();
    if let Some(way) = way {
        let mut way = way.lock();
        if let Some(open) = way.as_mut() {
            match take(open, round, &mut coming, left, ways, &mut came.parts) {
                Ok(true) => {}
                Ok(false) => {
                    came.gave_up = true;
                    give_up(ways);
                }
                Err(_) => *way = None,
            }
        }
    }
    for (id, Coming { placed, slice, pieces }) in coming {
        for (number, memory) in pieces.into_iter().enumerate() {
            let Some(memory) = memory else { continue };
            let (label, start) = (label(round, id, number), slice.start + (number * PIECE) as u64);
            came.missing.push(Missing { label, to: placed.to, shard: slice.shard, start, slice: id, memory });
        }
    }
    came
}

/// Takes `left` pieces; false where the sender says that no more come.
fn take<'a>(
    way: &mut BulkReceiver,
    round: u32,
    coming: &mut HashMap<SliceId, Coming<'a>>,
    mut left: usize,
    ways: &Ways<'a>,
    parts: &mut Vec<Part>,
) -> Result<bool> {
    let clock = Clock::system();
    let mut last = clock.now();
    while left > 0 {
        let (label, length) = match way.hear()? {
            Message::Piece(label, length) => (label, length),
            Message::GaveUp(_) => return Ok(false),
            Message::Beat if clock.now().since(last) > PATIENCE => {
                return Err(Error::corrupt("a rank that sends nothing"));
            }
            Message::Beat => continue,
        };
        let [of_round, tensor, slice, number] = label;
        let id = (tensor as usize, slice as usize);
        let known = coming.get_mut(&id).filter(|_| of_round == round).and_then(|coming| {
            let piece = coming.pieces.get_mut(number as usize)?.take_if(|piece| piece.len() == length)?;
            Some((coming.placed, coming.slice.start, piece))
        });
        let (placed, start, piece) =
            known.ok_or_else(|| Error::corrupt("a piece of nothing that is to come"))?;
        let filled = way.fill(piece);
        if !matches!(filled, Ok(true)) {
            // It comes again, or is to be read, whatever came of it.
            if let Some(place) = coming.get_mut(&id).and_then(|coming| coming.pieces.get_mut(number as usize))
            {
                *place = Some(piece);
            }
            filled?;
            continue;
        }
        let piece: &'a [u8] = piece;
        let start = start + u64::from(number) * PIECE as u64;
        let crc32c = forebay_core::crc32c(piece);
        parts.push(Part { slice: id, start, length: length as u64, crc32c });
        if let Some(way) = placed.to.and_then(|to| ways.get(&to)) {
            way.send(Some((label, piece))).ok();
        }
        (left, last) = (left - 1, clock.now());
    }
    Ok(true)
}
