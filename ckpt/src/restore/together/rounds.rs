//! Round after round: ranks fill their buffers, meet those of their host, and copy out of these.
//!
//! A rank's buffers take turns. What it reads itself is read ahead, of several rounds at once, into all buffers that nobody
//! copies out of any more: those of the rounds before the last one, since a meeting is over only where all have copied what the
//! meeting before it was about. Bytes of other hosts come and go a round after another, while those of the round before
//! are copied. Hosts do not meet: a rank waits for what is to come to it, and who sends for whoever is to take it.
//!
//! Who fails says so at its meeting and along its ways, and so do all who hear of it: none waits for what does not come.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::mpsc::{Receiver, channel};

use forebay_core::{Error, Result};
use parking_lot::Mutex;

use super::super::source::{Source, request_bytes};
use super::super::through::{self, Give};
use super::super::{
    Part, Segment, Shards, SliceId, Target, bytes_of, check_slices, differing, plan, read_all, scatter,
};
use super::relay::{Held, Links, Read, pass};
use super::{Placed, Together, Wish, source_of};
use crate::manifest::{Manifest, Slice, Tensor};

/// What came of filling a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filled {
    /// Whether all is in it. Else another rank tells why, or it was in another host's memory alone and did not come from there.
    pub is_whole: bool,
    /// The ranks of other hosts of which something did not come, or came damaged.
    pub lost: BTreeSet<usize>,
}

/// The memory that ranks of a host lend each other.
pub struct Lent<'a> {
    /// This rank's buffers, to be filled: [`Together::buffers`] of [`Together::buffer_bytes`].
    pub own: Vec<&'a mut [u8]>,
    /// Those of each of the host's ranks, in their order, this one's among them.
    pub all: Vec<Vec<&'a [u8]>>,
}

/// Where what a rank wants goes.
pub struct Places<'a> {
    /// What is copied into.
    pub targets: Vec<Target<'a>>,
    /// What is given away, for it cannot be copied into.
    pub wishes: &'a [Wish],
    /// Takes that.
    pub give: &'a mut Give<'a>,
}

/// Tells the ranks of this host what came of this one's turn, and hears whether all of them have theirs whole. It gives the
/// error that it is given, or its own.
pub type Meet<'a> = dyn FnMut(Result<Filled>) -> Result<bool> + 'a;

/// A slice, by its number in its tensor, and its bytes in a rank's buffer.
type Found<'a> = (usize, &'a [u8]);

impl Together {
    /// Reads what several ranks want, into place. False where some of it does not come; another rank tells why, or, where it was in
    /// other hosts' memory alone, this one at its meeting.
    ///
    /// # Errors
    /// What `meet` gives: that is told of this rank's errors, which are as those of [`super::super::read_tensors`]. `Bug` when
    /// lent memory is too short.
    pub fn read(
        &self,
        (shards, manifest): (&Shards<'_>, &Manifest),
        Lent { own, all }: Lent<'_>,
        links: &Links,
        mut places: Places<'_>,
        threads: usize,
        meet: &mut Meet<'_>,
    ) -> Result<bool> {
        let reading = &Reading::new(shards, manifest, threads)?;
        let lending = links.lend(&own);
        let outcome = std::thread::scope(|scope| {
            let mut free: Vec<Option<&mut [u8]>> = own.into_iter().map(Some).collect();
            let (buffers, mut begun) = (self.buffers(), 0);
            // Dropped where it ends early, which has them end, too.
            let mut running = VecDeque::new();
            for round in 0..self.rounds {
                while begun < self.rounds.min(round + buffers - 1) {
                    let buffer = free.get_mut(begun % buffers).and_then(Option::take);
                    let buffer = buffer.ok_or_else(|| Error::bug("a buffer that is not there"))?;
                    let (turn, its_turn) = channel();
                    let number = begun;
                    let fill = move || (self.fill(reading, number, buffer, links, &its_turn), buffer);
                    running.push_back((turn, scope.spawn(fill)));
                    begun += 1;
                }
                let Some((turn, filling)) = running.pop_front() else { break };
                turn.send(()).ok();
                let copied = match round.checked_sub(1) {
                    Some(last) => self.copy(manifest, last, &all, &mut places, threads),
                    None => Ok(()),
                };
                let joined = filling.join().map_err(|_| Error::bug("a reading thread panicked"));
                let filled = joined.and_then(|(filled, buffer)| {
                    free[round % buffers] = Some(buffer);
                    filled
                });
                if !meet(copied.and(filled))? {
                    return Ok(false);
                }
            }
            let last = self.rounds.checked_sub(1);
            last.map_or(Ok(true), |last| self.copy(manifest, last, &all, &mut places, threads).map(|()| true))
        });
        drop(lending);
        if !matches!(outcome, Ok(true)) {
            links.give_up();
        }
        outcome
    }

    /// Fills this rank's buffer with its slices of a round, each checked: it reads them, or, in its turn, has them from another
    /// host's rank by `links`, and passes them on. Where the turn does not come, nothing does.
    ///
    /// # Errors
    /// As [`super::super::read_tensors`], of what it is to read.
    pub(super) fn fill(
        &self,
        reading: &Reading<'_>,
        round: usize,
        buffer: &mut [u8],
        links: &Links,
        turn: &Receiver<()>,
    ) -> Result<Filled> {
        let (own, coming) = self.parts_of(reading, round, buffer);
        let ids: BTreeSet<SliceId> = coming.iter().map(|held| held.placed.slice).collect();
        let read_own = |segments: Vec<Segment<'_>>| {
            if round == 0 {
                self.check_shards(reading)?;
            }
            reading.read_checked(segments)
        };
        let read = |segments: Vec<Segment<'_>>| reading.read(segments);
        let read = self.is_in_store.then_some(&read as Read<'_>);
        let passed = pass(links, (round, turn), (own, coming), read_own, read)?;
        let mut filled = Filled { is_whole: passed.is_whole, lost: passed.lost };
        if filled.is_whole {
            let damaged: HashSet<SliceId> = differing(&reading.tensors, ids, passed.parts).collect();
            let (_, coming) = self.parts_of(reading, round, buffer);
            let mut again: Vec<_> =
                coming.into_iter().filter(|held| damaged.contains(&held.placed.slice)).collect();
            filled.lost.extend(again.iter().filter_map(|held| held.placed.from));
            if self.is_in_store {
                reading.read_checked(again.iter_mut().map(Held::segment).collect())?;
            } else {
                filled.is_whole = again.is_empty();
            }
        }
        Ok(filled)
    }

    /// That the shards are there, and whole, of which this rank reads.
    fn check_shards(&self, reading: &Reading<'_>) -> Result<()> {
        let all = self.placed[self.own].iter().flatten().filter(|placed| placed.from.is_none());
        let shards = all.map(|placed| reading.slice(placed.slice).shard).collect();
        reading.source.check(reading.manifest, shards)
    }

    /// A buffer as slices: those that this rank reads, and those that come from others.
    fn parts_of<'a>(
        &self,
        reading: &Reading<'a>,
        round: usize,
        buffer: &'a mut [u8],
    ) -> (Vec<Held<'a>>, Vec<Held<'a>>) {
        let (mut rest, mut at) = (buffer, 0);
        let held = self.placed(round, self.own).iter().map(|placed| {
            let slice = reading.slice(placed.slice);
            let (_, after) = std::mem::take(&mut rest).split_at_mut(placed.at - at);
            let (memory, after) = after.split_at_mut(slice.len() as usize);
            (rest, at) = (after, placed.at + memory.len());
            Held { placed: *placed, slice, memory }
        });
        held.partition(|held| held.placed.from.is_none())
    }

    /// Takes what is wanted of a round out of the buffers of this host.
    ///
    /// # Errors
    /// `Bug` when a buffer is too short, and the first that giving away had.
    fn copy(
        &self,
        manifest: &Manifest,
        round: usize,
        lent: &[Vec<&[u8]>],
        places: &mut Places<'_>,
        threads: usize,
    ) -> Result<()> {
        let of_tensors = self.found(manifest, round, lent)?;
        let queue = Mutex::new(places.targets.iter_mut());
        let work = || {
            loop {
                let next = queue.lock().next();
                let Some(target) = next else { return Ok(()) };
                let tensor = &manifest.tensors[target.tensor];
                for (slice, bytes) in &of_tensors[target.tensor] {
                    scatter(tensor, &tensor.slices[*slice], bytes, target)?;
                }
            }
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads.max(1)).map(|_| scope.spawn(work)).collect();
            let own = work();
            let bug = |_| Err(Error::bug("a copying thread panicked"));
            others.into_iter().map(|thread| thread.join().unwrap_or_else(bug)).fold(own, Result::and)
        })?;
        for (number, Wish { tensor, region }) in places.wishes.iter().enumerate() {
            let (found, tensor) = (&of_tensors[*tensor], &manifest.tensors[*tensor]);
            for (slice, bytes) in found {
                through::give_slice(tensor, &tensor.slices[*slice], (number, region), bytes, places.give)?;
            }
        }
        Ok(())
    }

    /// What this rank may take out of its host's buffers of each tensor.
    fn found<'a>(
        &self,
        manifest: &Manifest,
        round: usize,
        lent: &[Vec<&'a [u8]>],
    ) -> Result<Vec<Vec<Found<'a>>>> {
        let mut of_tensors: Vec<Vec<Found<'a>>> = vec![Vec::new(); manifest.tensors.len()];
        for near in 0..self.near.len() {
            let buffer = lent.get(near).and_then(|buffers| buffers.get(round % self.buffers()));
            let taken = self.placed(round, near).iter().filter(|placed| self.shared.contains(&placed.slice));
            for Placed { slice, at, .. } in taken {
                let length = manifest.tensors[slice.0].slices[slice.1].len() as usize;
                let bytes = buffer.and_then(|buffer| buffer.get(*at..at + length));
                let short = || Error::bug("lent memory that is shorter than what is in it");
                of_tensors[slice.0].push((slice.1, bytes.ok_or_else(short)?));
            }
        }
        Ok(of_tensors)
    }

    /// What is in the buffer that one of this host's ranks fills.
    fn placed(&self, round: usize, near: usize) -> &[Placed] {
        self.placed[near].get(round).map_or(&[], Vec::as_slice)
    }
}

/// What is read of.
pub(super) struct Reading<'a> {
    source: Source<'a>,
    manifest: &'a Manifest,
    tensors: Vec<&'a Tensor>,
    threads: usize,
}

impl<'a> Reading<'a> {
    pub(super) fn new(shards: &'a Shards<'_>, manifest: &'a Manifest, threads: usize) -> Result<Self> {
        let tensors = manifest.tensors.iter().collect();
        Ok(Self { source: source_of(shards)?, manifest, tensors, threads })
    }

    fn slice(&self, (tensor, slice): SliceId) -> &'a Slice {
        &self.tensors[tensor].slices[slice]
    }

    fn read(&self, segments: Vec<Segment<'_>>) -> Result<Vec<Part>> {
        let at_once = self.source.at_once();
        let most = request_bytes(bytes_of(&segments), at_once);
        read_all(&self.source, self.manifest, plan(segments, most), (self.threads, at_once))
    }

    fn read_checked(&self, segments: Vec<Segment<'_>>) -> Result<()> {
        let named = segments.iter().map(|segment| segment.slice).collect();
        let parts = self.read(segments)?;
        check_slices(&self.source, self.manifest, &self.tensors, named, parts)
    }
}
