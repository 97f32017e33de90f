//! What can be set about sharing blocks with other hosts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_core::{Error, Result};
use forebay_io::net::secure::{self, Listen, Transport, read_secret};
use serde::{Deserialize, Serialize};

/// How often who works on an answer says so.
pub(super) const BEAT: Duration = Duration::from_secs(1);

/// The port that hosts listen at, and are looked for at, where none is named.
const PORT: u16 = 7400;

/// How hosts that mount one volume share the blocks that they have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PeerSettings {
    /// Names or addresses of all hosts, this one among them or not, with `:PORT` where it is another than 7400. A name
    /// stands for all addresses that it has, and is looked up every ten seconds. Default none: nothing is shared.
    pub members: Vec<String>,
    /// A file with what all of them know and nobody else does; 16 bytes or more. White space around it does not count.
    pub secret: Option<PathBuf>,
    /// Where this host listens: an address, a port behind `:`, or both. Default port 7400 of all addresses.
    pub listen: Option<String>,
    /// What carries blocks: `tcp` or `quic`. Default `tcp`.
    pub transport: Transport,
    /// Whether what came from another host is kept on this one's disk, too. Default false: each host's disk holds its own
    /// share, so that together they hold as much as all their disks.
    pub keep: bool,
    /// Milliseconds until the store is asked for a block that its owner works on; an owner that says nothing for three tenths of
    /// it, where it should say each second that it works, is away. Default 10,000: ten times what a store that is well takes.
    pub deadline_ms: u64,
}

impl Default for PeerSettings {
    fn default() -> Self {
        Self {
            members: Vec::new(),
            secret: None,
            listen: None,
            transport: Transport::Tcp,
            keep: false,
            deadline_ms: 10_000,
        }
    }
}

impl PeerSettings {
    /// How long a host may say nothing, whatever it works on, until it counts as away: three tenths of the deadline, and more than
    /// what passes from one word to the next.
    pub(super) fn silence(&self) -> Duration {
        Duration::from_millis(self.deadline_ms.saturating_mul(3) / 10).max(2 * BEAT)
    }

    /// How long the store waits to be asked for what an owner works on.
    pub(super) fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    /// Whether blocks are shared.
    pub fn is_on(&self) -> bool {
        !self.members.is_empty()
    }

    /// Refuses settings that cannot work.
    ///
    /// # Errors
    /// `Invalid`, with what to set.
    pub fn validate(&self) -> Result<()> {
        if !self.is_on() {
            return match self.secret.is_some() || self.listen.is_some() {
                true => Err(Error::invalid("other hosts are set up, and none is named")
                    .with_hint("name them: `peers`, or `members` of [volume.cache.peers]")),
                false => Ok(()),
            };
        }
        if self.secret.is_none() {
            return Err(Error::invalid("blocks are shared among those who know a secret, and none is given")
                .with_hint(
                    "give each host the same file: `peer_secret`, or `secret` of [volume.cache.peers]",
                ));
        }
        if self.deadline_ms == 0 {
            return Err(Error::invalid("other hosts that may take no time are never asked")
                .with_hint("set `deadline_ms` to 1 or more, or name no hosts"));
        }
        self.listen()?;
        self.members.iter().try_for_each(|member| endpoint(member).map(drop))
    }

    /// What the secret's file holds.
    ///
    /// # Errors
    /// What the file system says, naming the file.
    pub(super) async fn read_secret(&self) -> Result<Vec<u8>> {
        read_secret(self.secret.as_deref().unwrap_or(Path::new(""))).await
    }

    /// Where this host listens.
    pub(super) fn listen(&self) -> Result<Listen> {
        Listen::parse(self.listen.as_deref(), PORT)
    }
}

/// A host's name or address, and its port.
pub(super) fn endpoint(text: &str) -> Result<(&str, u16)> {
    secure::endpoint(text, PORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let named =
            PeerSettings { members: vec!["a".into()], secret: Some("/s".into()), ..PeerSettings::default() };
        named.validate().expect("whole");
        PeerSettings::default().validate().expect("none");
        for (wrong, says) in [
            (PeerSettings { secret: None, ..named.clone() }, "secret"),
            (PeerSettings { members: vec![], ..named.clone() }, "none is named"),
            (PeerSettings { members: vec!["a:b".into()], ..named.clone() }, "`a:b`"),
            (PeerSettings { listen: Some("host:7".into()), ..named.clone() }, "`host`"),
            (PeerSettings { deadline_ms: 0, ..named.clone() }, "no time"),
        ] {
            let error = wrong.validate().expect_err(says);
            assert!(error.to_string().contains(says), "{error}");
        }
        let listen =
            |text: &str| PeerSettings { listen: Some(text.into()), ..named.clone() }.listen().expect(text);
        assert_eq!(listen(":81"), Listen { ip: None, port: 81 });
        assert_eq!(listen("127.0.0.1:0").to_string(), "127.0.0.1:0");
    }
}
