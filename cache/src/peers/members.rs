//! All hosts that share blocks, by the names that they have.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use forebay_io::net::secure::Host;
use futures::stream::{self, StreamExt};
use parking_lot::{Mutex, RwLock};

use super::member::{Member, Standing};
use super::ring;
use super::settings::endpoint;
use super::wire::Who;
use crate::block::BlockId;

/// How long the look at one name may take.
const LOOKUP: Duration = Duration::from_secs(5);
/// How long one member may take to be reached and to say who it is: who is slower holds up the look at all others.
const GREETING: Duration = Duration::from_secs(3);
/// Members that are looked for at once.
const AT_ONCE: usize = 128;

/// The members, whether they are there or not.
#[derive(Debug)]
pub(super) struct Members {
    /// Who this process is.
    own: Who,
    /// How long one of them may say nothing.
    silence: Duration,
    all: RwLock<Arc<[Arc<Member>]>>,
    names: Mutex<BTreeMap<String, Name>>,
}

/// What is known of a name.
#[derive(Debug, Default)]
struct Name {
    /// The addresses that it had when it could be looked up last.
    addresses: Vec<SocketAddr>,
    /// Whether it was told that it cannot be looked up.
    is_told: bool,
}

impl Members {
    /// None yet, beside `own`, each of which may say nothing for so long.
    pub(super) fn new(own: Who, silence: Duration) -> Self {
        Self { own, silence, all: RwLock::new(Arc::new([])), names: Mutex::default() }
    }

    fn all(&self) -> Arc<[Arc<Member>]> {
        self.all.read().clone()
    }

    /// Who is asked for a block, of those that are there; none where that is this host.
    pub(super) fn owner(&self, id: &BlockId) -> Option<Arc<Member>> {
        let all = self.all();
        let others = all.iter().filter_map(|member| Some((member.who()?, Some(member))));
        let candidates = others.chain(std::iter::once((self.own, None)));
        ring::owner(candidates, |(who, _)| *who, id)?.1.cloned()
    }

    /// The one that says that it is `who`, if it is there.
    pub(super) fn known_as(&self, who: Who) -> Option<Arc<Member>> {
        self.all().iter().find(|member| member.who() == Some(who)).cloned()
    }

    /// All but this host.
    pub(super) fn others(&self) -> Vec<Arc<Member>> {
        self.all().iter().filter(|member| member.standing() != Standing::Own).cloned().collect()
    }

    /// How many others there are, and how many of them answer.
    pub(super) fn count(&self) -> (u64, u64) {
        let others = self.others();
        let here = others.iter().filter(|member| member.standing() == Standing::Here);
        (others.len() as u64, here.count() as u64)
    }

    /// Takes the addresses that the names have now.
    pub(super) async fn look_up(&self, names: &[String]) {
        let look = |text: &String| {
            let text = text.clone();
            async move {
                let found = match endpoint(&text) {
                    Ok(place) => tokio::time::timeout(LOOKUP, tokio::net::lookup_host(place)).await,
                    Err(_) => return (text, Ok(Vec::new())),
                };
                let found = found.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
                let found = found.map(Iterator::collect);
                (text, found)
            }
        };
        let looks: Vec<_> = names.iter().map(look).collect();
        self.take(stream::iter(looks).buffered(AT_ONCE).collect().await);
    }

    /// Takes what was found under each name. One that could not be looked up keeps the addresses that it had.
    fn take(&self, found: Vec<(String, io::Result<Vec<SocketAddr>>)>) {
        let mut names = self.names.lock();
        for (text, found) in found {
            let name = names.entry(text.clone()).or_default();
            match found {
                Ok(addresses) => *name = Name { addresses, is_told: false },
                Err(error) if !name.is_told => {
                    name.is_told = true;
                    tracing::warn!(name = %text, %error, "a name of peers cannot be looked up; what it stood for stays");
                }
                Err(_) => {}
            }
        }
        let addresses: BTreeSet<SocketAddr> =
            names.values().flat_map(|name| &name.addresses).copied().collect();
        drop(names);
        let before = self.all();
        let stays = |member: &&Arc<Member>| addresses.contains(&member.address);
        let mut after: Vec<Arc<Member>> = before.iter().filter(stays).cloned().collect();
        let (stay, is_new) =
            (after.len(), |at: &&SocketAddr| !before.iter().any(|member| member.address == **at));
        after.extend(addresses.iter().filter(is_new).map(|at| Arc::new(Member::new(*at, self.silence))));
        if stay < before.len() || after.len() > stay {
            tracing::info!(
                peers = after.len(),
                before = before.len(),
                "the hosts that share blocks are others now"
            );
            *self.all.write() = after.into();
        }
    }

    /// Looks for those that are away.
    pub(super) async fn greet(&self, host: &Host) {
        let all = self.all();
        all.iter().for_each(|member| member.tidy());
        let greet = |member: Arc<Member>| async move {
            tokio::time::timeout(GREETING, member.greet(host, self.own)).await.ok();
        };
        let missed: Vec<_> = all.iter().filter(|member| member.is_missed()).cloned().collect();
        stream::iter(missed).map(greet).buffer_unordered(AT_ONCE).collect::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(members: &Members) -> Vec<String> {
        let mut all: Vec<_> = members.all().iter().map(|member| member.address.to_string()).collect();
        all.sort();
        all
    }

    fn found(addresses: &[&str]) -> io::Result<Vec<SocketAddr>> {
        Ok(addresses.iter().map(|address| address.parse().expect("an address")).collect())
    }

    #[test]
    fn a_name_stands_for_all_its_addresses_and_one_that_cannot_be_looked_up_takes_none_away() {
        let members = Members::new(Who { share: 1, process: 1 }, Duration::from_secs(3));
        let take = |service, other| members.take(vec![("service".into(), service), ("other".into(), other)]);
        take(found(&["10.0.0.1:7400", "10.0.0.2:7400"]), found(&["10.0.0.2:7400", "10.0.0.3:7400"]));
        assert_eq!(addresses(&members), ["10.0.0.1:7400", "10.0.0.2:7400", "10.0.0.3:7400"]);
        let kept = members.all()[1].clone();
        take(found(&["10.0.0.2:7400", "10.0.0.4:7400"]), found(&[]));
        assert_eq!(addresses(&members), ["10.0.0.2:7400", "10.0.0.4:7400"]);
        assert!(members.all().iter().any(|member| Arc::ptr_eq(member, &kept)), "with what is known of it");
        take(found(&["10.0.0.5:7400"]), Err(io::ErrorKind::TimedOut.into()));
        assert_eq!(addresses(&members), ["10.0.0.5:7400"]);
        take(found(&["10.0.0.5:7400"]), found(&["10.0.0.6:7400"]));
        take(Err(io::ErrorKind::TimedOut.into()), Err(io::ErrorKind::TimedOut.into()));
        assert_eq!(addresses(&members), ["10.0.0.5:7400", "10.0.0.6:7400"]);
        take(found(&["10.0.0.5:7400"]), found(&[]));
        assert_eq!(addresses(&members), ["10.0.0.5:7400"]);
        assert_eq!(members.count(), (1, 0));
        assert!(members.owner(&BlockId { digest: 1, index: 0 }).is_none(), "nobody has answered");
    }

    #[tokio::test]
    async fn names_are_looked_up() {
        let members = Members::new(Who { share: 1, process: 1 }, Duration::from_secs(3));
        members.look_up(&["localhost:7401".into(), "127.0.0.9".into(), "no.such.host.invalid".into()]).await;
        let all = addresses(&members);
        assert!(all.contains(&"127.0.0.1:7401".into()) && all.contains(&"127.0.0.9:7400".into()), "{all:?}");
        let names = members.names.lock();
        assert!(names["no.such.host.invalid"].addresses.is_empty() && names.len() == 3);
    }
}
