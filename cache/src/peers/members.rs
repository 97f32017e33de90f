//! All hosts that share blocks, by the names that they have.

use std::collections::BTreeSet;
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
/// Members that are looked for at once.
const GREETINGS: usize = 32;

/// The members, whether they are there or not.
#[derive(Debug)]
pub(super) struct Members {
    all: RwLock<Arc<[Arc<Member>]>>,
    /// Names that could not be looked up, so that each is told once.
    unknown: Mutex<BTreeSet<String>>,
}

impl Default for Members {
    fn default() -> Self {
        Self { all: RwLock::new(Arc::new([])), unknown: Mutex::default() }
    }
}

impl Members {
    fn all(&self) -> Arc<[Arc<Member>]> {
        self.all.read().clone()
    }

    /// Who is asked for a block, of those that are there; none where that is this host, or nobody.
    pub(super) fn owner(&self, id: &BlockId) -> Option<Arc<Member>> {
        let all = self.all();
        let present = all.iter().filter(|member| member.standing() != Standing::Away);
        let owner = ring::owner(present, |member| member.share(), id)?;
        (owner.standing() == Standing::Here).then(|| owner.clone())
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
        self.take(stream::iter(looks).buffered(GREETINGS).collect().await);
    }

    /// Takes what was found under each name. Where one could not be looked up all that were known stay.
    fn take(&self, found: Vec<(String, io::Result<Vec<SocketAddr>>)>) {
        let (mut addresses, mut is_whole) = (BTreeSet::new(), true);
        for (name, found) in found {
            match found {
                Ok(found) => {
                    addresses.extend(found);
                    self.unknown.lock().remove(&name);
                }
                Err(error) => {
                    is_whole = false;
                    if self.unknown.lock().insert(name.clone()) {
                        tracing::warn!(%name, %error, "a name of peers cannot be looked up; those known stay");
                    }
                }
            }
        }
        let before = self.all();
        let stays = |member: &&Arc<Member>| !is_whole || addresses.contains(&member.address);
        let mut after: Vec<Arc<Member>> = before.iter().filter(stays).cloned().collect();
        let is_new = |address: &&SocketAddr| !before.iter().any(|member| member.address == **address);
        let left = before.len() - after.len();
        after.extend(addresses.iter().filter(is_new).map(|address| Arc::new(Member::new(*address))));
        if left > 0 || after.len() != before.len() {
            tracing::info!(
                peers = after.len(),
                before = before.len(),
                "the hosts that share blocks are others now"
            );
            *self.all.write() = after.into();
        }
    }

    /// Looks for those that are away.
    pub(super) async fn greet(&self, host: &Host, own: Who) {
        let all = self.all();
        all.iter().for_each(|member| member.tidy());
        let away = all.iter().filter(|member| member.is_missed());
        let greet = |member: Arc<Member>| async move {
            match member.greet(host, own).await {
                Ok(()) => tracing::info!(peer = %member.address, "a peer is there"),
                Err(error) => member.tell_once(&error),
            }
        };
        let away: Vec<_> = away.cloned().collect();
        stream::iter(away).map(greet).buffer_unordered(GREETINGS).collect::<()>().await;
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
        let members = Members::default();
        let take = |service, other| members.take(vec![("service".into(), service), ("other".into(), other)]);
        take(found(&["10.0.0.1:7400", "10.0.0.2:7400"]), found(&["10.0.0.2:7400", "10.0.0.3:7400"]));
        assert_eq!(addresses(&members), ["10.0.0.1:7400", "10.0.0.2:7400", "10.0.0.3:7400"]);
        let kept = members.all()[1].clone();
        take(found(&["10.0.0.2:7400", "10.0.0.4:7400"]), found(&[]));
        assert_eq!(addresses(&members), ["10.0.0.2:7400", "10.0.0.4:7400"]);
        assert!(members.all().iter().any(|member| Arc::ptr_eq(member, &kept)), "with what is known of it");
        take(found(&["10.0.0.5:7400"]), Err(io::ErrorKind::TimedOut.into()));
        assert_eq!(addresses(&members), ["10.0.0.2:7400", "10.0.0.4:7400", "10.0.0.5:7400"]);
        take(found(&["10.0.0.5:7400"]), found(&[]));
        assert_eq!(addresses(&members), ["10.0.0.5:7400"]);
        assert_eq!(members.count(), (1, 0));
        assert!(members.owner(&BlockId { digest: 1, index: 0 }).is_none(), "nobody has answered");
    }

    #[tokio::test]
    async fn names_are_looked_up() {
        let members = Members::default();
        members.look_up(&["localhost:7401".into(), "127.0.0.9".into(), "no.such.host.invalid".into()]).await;
        let all = addresses(&members);
        assert!(all.contains(&"127.0.0.1:7401".into()) && all.contains(&"127.0.0.9:7400".into()), "{all:?}");
        assert_eq!(members.unknown.lock().len(), 1);
    }
}
