//! Blocks that many hosts want at once: the owner sends each to one of them, which passes it on while it arrives, and so on.
//!
//! Where all hosts of a job read one file, the link of each block's owner would carry it to all others, while their own
//! links stand idle. So one that has a block, or is being sent it, sends it to one other at a time, and who comes next is
//! referred to the first of those that came before that sends it to nobody: a chain, in order of arrival, in which every
//! link carries the block once. No host waits for one that came later. It is known to the owner alone, for as long as
//! anybody is being sent the block.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;

use super::wire::Who;
use crate::block::BlockId;

/// Hosts of one chain: the last ones have it so many times later as it takes to pass a piece on, and wait for the slowest
/// of those before them. For who comes then, the owner begins another one.
const LONGEST: u32 = 16;

/// The blocks that hosts are being sent.
#[derive(Debug)]
pub(super) struct Crowds {
    /// This host.
    own: Who,
    all: Mutex<HashMap<BlockId, Crowd>>,
}

/// Those who are being sent one block.
#[derive(Debug)]
struct Crowd {
    turns: usize,
    /// Turns so far, which number them.
    begun: u64,
    /// Those who have it or will, in order of arrival, this host first.
    holders: Vec<Holder>,
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    who: Who,
    /// Its last turn.
    turn: u64,
    /// Hosts before it in its chain.
    before: u32,
    /// To how many it sends the block now.
    sends: u32,
    /// Whether others are referred to it.
    is_named: bool,
}

/// A host's turn to be sent a block. Others are referred to it from then on, until it turns out not to have had it.
#[derive(Debug)]
pub(super) struct Turn {
    crowds: Arc<Crowds>,
    id: BlockId,
    asker: Who,
    /// Which one of its crowd it is.
    number: u64,
    /// Who sends it.
    from: Who,
    came: Came,
}

/// What came of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Came {
    /// The block, which is kept for others or not.
    Block { is_kept: bool },
    /// Nothing, as who had the turn says.
    Nothing,
    /// Nobody knows.
    Unknown,
}

impl Crowds {
    /// Of the blocks that `own` has for others.
    pub(super) fn new(own: Who) -> Arc<Self> {
        Arc::new(Self { own, all: Mutex::default() })
    }

    /// Has somebody send a block to `asker`, this host itself where `is_own`.
    pub(super) fn enter(self: &Arc<Self>, id: BlockId, asker: Who, is_own: bool) -> Turn {
        let mut all = self.all.lock();
        let crowd = all.entry(id).or_insert_with(|| {
            let holders = vec![Holder { who: self.own, turn: 0, before: 0, sends: 0, is_named: true }];
            Crowd { turns: 0, begun: 0, holders }
        });
        crowd.turns += 1;
        crowd.begun += 1;
        let number = crowd.begun;
        let known = crowd.holders.iter().position(|holder| holder.who == asker);
        // Those who were referred to who asks again may wait for it still: it is to wait for none of them.
        let sender = if is_own || known.is_some() { 0 } else { crowd.idlest() };
        let sender = &mut crowd.holders[sender];
        sender.sends += 1;
        let (from, before) = (sender.who, sender.before + 1);
        match known.map(|known| &mut crowd.holders[known]) {
            Some(holder) => *holder = Holder { turn: number, before, is_named: true, ..*holder },
            None => crowd.holders.push(Holder { who: asker, turn: number, before, sends: 0, is_named: true }),
        }
        Turn { crowds: self.clone(), id, asker, number, from, came: Came::Unknown }
    }

    /// How many are being sent the block.
    #[cfg(test)]
    pub(super) fn turns(&self, id: BlockId) -> usize {
        self.all.lock().get(&id).map_or(0, |crowd| crowd.turns)
    }

    /// Blocks that somebody is being sent.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.all.lock().len()
    }
}

impl Turn {
    /// Who is to send the block in the place of this host.
    pub(super) fn referred_to(&self) -> Option<Who> {
        Some(self.from).filter(|who| *who != self.crowds.own)
    }

    /// It has the block, which is kept for others or not.
    pub(super) fn arrived(mut self, is_kept: bool) {
        self.came = Came::Block { is_kept };
    }

    /// Who was to send the block did not.
    pub(super) fn missed(mut self) {
        self.came = Came::Nothing;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Entry::Occupied(mut entry) = self.crowds.all.lock().entry(self.id) {
            let crowd = entry.get_mut();
            crowd.turns -= 1;
            if let Some(sender) = crowd.find(self.from) {
                sender.sends = sender.sends.saturating_sub(1);
                sender.is_named &= self.came != Came::Nothing || self.from == self.crowds.own;
            }
            if let Some(asker) = crowd.find(self.asker).filter(|asker| asker.turn == self.number) {
                asker.is_named = self.came == Came::Block { is_kept: true };
            }
            if crowd.turns == 0 {
                entry.remove();
            }
        }
    }
}

impl Crowd {
    /// Of those who may send the block the one that sends it to the fewest, and of these the first.
    fn idlest(&self) -> usize {
        let may_send = |holder: &Holder| holder.is_named && holder.before < LONGEST;
        let holders = self.holders.iter().enumerate().filter(|(_, holder)| may_send(holder));
        holders.min_by_key(|(_, holder)| holder.sends).map_or(0, |(at, _)| at)
    }

    fn find(&mut self, who: Who) -> Option<&mut Holder> {
        self.holders.iter_mut().find(|holder| holder.who == who)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: BlockId = BlockId { digest: 1, index: 0 };

    fn who(number: u64) -> Who {
        Who { share: number, process: 1 }
    }

    /// Who sends to each of the hosts 1, 2, 3 and so on, that want one block at the same time of host 0.
    fn senders(turns: &[Turn]) -> Vec<u64> {
        turns.iter().map(|turn| turn.referred_to().map_or(0, |who| who.share)).collect()
    }

    #[test]
    fn a_crowd_is_a_chain_in_order_of_arrival() {
        let crowds = Crowds::new(who(0));
        let mut turns: Vec<_> = (1..=20).map(|number| crowds.enter(ID, who(number), false)).collect();
        let chains = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 17, 18, 19];
        assert_eq!(senders(&turns), chains);
        let another = BlockId { index: 1, ..ID };
        assert_eq!(senders(&[crowds.enter(another, who(1), false)]), [0], "another block");
        // 3 has it from 2, which may send it again.
        turns.remove(2).arrived(true);
        assert_eq!(senders(&[crowds.enter(ID, who(21), false)]), [2]);
        drop(turns);
        assert_eq!(crowds.len(), 0, "nothing is known once nobody waits");
    }

    #[test]
    fn a_thousand_hosts_send_a_block_to_few_others_each() {
        let crowds = Crowds::new(who(0));
        let turns: Vec<_> = (1..=1000).map(|number| crowds.enter(ID, who(number), false)).collect();
        let mut sends = HashMap::<u64, u32>::new();
        let mut before = HashMap::from([(0, 0)]);
        for (number, sender) in (1..).zip(senders(&turns)) {
            *sends.entry(sender).or_default() += 1;
            before.insert(number, before[&sender] + 1);
        }
        let most = sends.values().max().copied();
        assert!(most <= Some(4), "{most:?}");
        assert_eq!(before.values().max(), Some(&LONGEST));
    }

    #[test]
    fn nobody_is_referred_to_who_does_not_have_it() {
        let crowds = Crowds::new(who(0));
        let mut turns: Vec<_> = (1..=4).map(|number| crowds.enter(ID, who(number), false)).collect();
        assert_eq!(senders(&turns), [0, 1, 2, 3]);
        // 3 did not send it to 4, which has it from its owner then; 1 has it, and keeps it not.
        turns.pop().expect("four").missed();
        turns.push(crowds.enter(ID, who(4), true));
        turns.remove(0).arrived(false);
        turns.extend((5..=7).map(|number| crowds.enter(ID, who(number), false)));
        assert_eq!(senders(&turns[2..]), [0, 4, 5, 6]);
        // 5 asks again: not from those who may wait for it. What ends late of its first turn says nothing of that one.
        turns.push(crowds.enter(ID, who(5), false));
        drop(turns.remove(3));
        turns.push(crowds.enter(ID, who(8), false));
        assert_eq!(senders(&turns[2..]), [0, 5, 6, 0, 4]);
        drop(turns);
        assert_eq!(crowds.len(), 0);
    }

    #[test]
    fn who_is_alone_is_sent_it_by_who_has_it() {
        let crowds = Crowds::new(who(0));
        for _ in 0..3 {
            let turn = crowds.enter(ID, who(1), false);
            assert_eq!(turn.referred_to(), None);
            turn.arrived(true);
        }
        assert_eq!(crowds.len(), 0);
    }
}
