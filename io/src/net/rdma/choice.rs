//! Which of a host's ports is used, and which of its addresses.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use forebay_core::{Error, Result};

use super::verbs::{ACTIVE, Context, ETHERNET, Gid, Owned, Verbs};

/// The ports that may be used.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Wanted {
    /// Whatever is there.
    #[default]
    Any,
    /// None: bytes go over TCP.
    None,
    /// These.
    Named(Vec<Named>),
}

/// A device, if given one of its ports, and if given one of its addresses (the index of a GID).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    device: String,
    port: Option<u8>,
    gid: Option<u16>,
}

impl FromStr for Wanted {
    type Err = Error;

    /// `auto`, `off`, or `DEVICE[:PORT[:GID]]` several times, separated by commas.
    fn from_str(text: &str) -> Result<Self> {
        let invalid = |part: &str| {
            Error::invalid(format!("FOREBAY_RDMA: {part:?} is no port")).with_hint(
                "use auto, off, or DEVICE[:PORT[:GID_INDEX]], separated by commas, as in mlx5_0:1:3,mlx5_1",
            )
        };
        let named = |part: &str| {
            let mut parts = part.trim().splitn(3, ':');
            let device =
                parts.next().filter(|device| !device.is_empty()).ok_or_else(|| invalid(part))?.to_owned();
            let port = parts.next().map(str::parse).transpose().map_err(|_| invalid(part))?;
            let gid = parts.next().map(str::parse).transpose().map_err(|_| invalid(part))?;
            Ok(Named { device, port, gid })
        };
        match text.trim() {
            "" | "auto" => Ok(Self::Any),
            "off" => Ok(Self::None),
            names => Ok(Self::Named(names.split(',').map(named).collect::<Result<_>>()?)),
        }
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Named(names) = self else {
            return f.write_str(if *self == Self::Any { "auto" } else { "off" });
        };
        for (at, Named { device, port, gid }) in names.iter().enumerate() {
            write!(f, "{}{device}", if at > 0 { "," } else { "" })?;
            if let Some(port) = port {
                write!(f, ":{port}")?;
            }
            if let Some(gid) = gid {
                write!(f, ":{gid}")?;
            }
        }
        Ok(())
    }
}

impl Wanted {
    /// A port that is up as it is to be used, if it is wanted and has an address.
    pub(super) fn choose(&self, device: &str, found: Found) -> Option<Port> {
        let Found { number, kind, lid, mtu, addresses } = found;
        let gid = match self {
            Self::None => return None,
            Self::Any => None,
            Self::Named(names) => {
                let is_it =
                    |named: &&Named| named.device == device && named.port.is_none_or(|port| port == number);
                names.iter().find(is_it)?.gid
            }
        };
        let address = match gid {
            Some(index) => addresses.into_iter().find(|address| address.index == index),
            None => {
                addresses.into_iter().max_by_key(|address| (address.rank(kind), u16::MAX - address.index))
            }
        }?;
        Some(Port { number, kind, lid, mtu, gid: address.gid, index: address.index as u8 })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    InfiniBand,
    Ethernet,
}

/// A port that is used, and under which of its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Port {
    pub(super) number: u8,
    pub(super) kind: Kind,
    pub(super) lid: u16,
    /// As `ibv_mtu` has it.
    pub(super) mtu: u32,
    pub(super) gid: Gid,
    pub(super) index: u8,
}

impl Port {
    /// It, as people are told of it.
    pub(super) fn of(&self, device: &str) -> String {
        let kind = match self.kind {
            Kind::InfiniBand => "InfiniBand",
            Kind::Ethernet => "RoCE",
        };
        format!("{device}:{} ({kind})", self.number)
    }
}

/// A port that is up.
#[derive(Debug, Clone)]
pub(super) struct Found {
    number: u8,
    kind: Kind,
    lid: u16,
    mtu: u32,
    addresses: Vec<Address>,
}

/// One of a port's addresses.
#[derive(Debug, Clone, Copy)]
struct Address {
    index: u16,
    gid: Gid,
    /// Whether it is one of RoCE's second version, which is routed.
    is_routed: bool,
}

impl Address {
    /// What is better is higher: over Ethernet what is routed, and of that an address of IPv4, which is there where a link-local one may
    /// not be reached.
    fn rank(&self, kind: Kind) -> u8 {
        let Gid(bytes) = self.gid;
        let is_mapped = bytes[..10] == [0; 10] && bytes[10..12] == [0xff; 2];
        let is_local = bytes[..2] == [0xfe, 0x80];
        match kind {
            Kind::InfiniBand => 0,
            Kind::Ethernet => u8::from(self.is_routed) * 4 + u8::from(is_mapped) * 2 + u8::from(!is_local),
        }
    }
}

/// What a port has, if it is there and up.
pub(super) fn look(verbs: &Verbs, device: &str, context: &Owned<Context>, number: u8) -> Option<Found> {
    let port = verbs.port(context, number).filter(|port| port.state == ACTIVE)?;
    let kind = if port.link_layer == ETHERNET { Kind::Ethernet } else { Kind::InfiniBand };
    // Which version an address is of is known to the kernel alone.
    let types = PathBuf::from(format!("/sys/class/infiniband/{device}/ports/{number}/gid_attrs/types"));
    let address = |index: u16| {
        let gid = verbs.gid(context, number, i32::from(index))?;
        let kind = std::fs::read_to_string(types.join(index.to_string())).unwrap_or_default();
        Some(Address { index, gid, is_routed: kind.contains("v2") })
    };
    let most = u16::try_from(port.gids).unwrap_or(0).min(u16::from(u8::MAX));
    let addresses = (0..most).filter_map(address).collect();
    Some(Found { number, kind, lid: port.lid, mtu: port.mtu, addresses })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Wanted {
        text.parse().expect("valid")
    }

    #[test]
    fn ports_are_named_as_people_name_them() {
        assert_eq!((parse(""), parse("auto"), parse(" off ")), (Wanted::Any, Wanted::Any, Wanted::None));
        for text in ["mlx5_0", "mlx5_0:1", "mlx5_0:1:3,mlx5_1", "rxe0"] {
            assert_eq!(parse(text).to_string(), text);
        }
        for text in [",", "mlx5_0,", "mlx5_0:one", "mlx5_0:1:x", ":1", "mlx5_0:300"] {
            let error = text.parse::<Wanted>().expect_err(text);
            assert!(error.hint().is_some_and(|hint| hint.contains("GID_INDEX")), "{error}");
        }
    }

    fn address(index: u16, first: &[u8], is_routed: bool) -> Address {
        let mut bytes = [1; 16];
        bytes[..first.len()].copy_from_slice(first);
        Address { index, gid: Gid(bytes), is_routed }
    }

    #[test]
    fn of_a_ports_addresses_the_one_that_is_reached_is_taken() {
        let mapped = [[0; 10].as_slice(), &[0xff; 2]].concat();
        let addresses = vec![
            address(0, &[0xfe, 0x80], false),
            address(1, &[0xfe, 0x80], true),
            address(2, &mapped, false),
            address(3, &mapped, true),
            address(4, &[0x20, 1], true),
            address(5, &mapped, true),
        ];
        let found = Found { number: 1, kind: Kind::Ethernet, lid: 0, mtu: 5, addresses };
        let index = |wanted: &str, found: &Found| {
            parse(wanted).choose("mlx5_0", found.clone()).map(|port| port.index)
        };
        assert_eq!(index("auto", &found), Some(3), "routed, of IPv4, the first");
        assert_eq!(index("mlx5_0:1:4", &found), Some(4));
        assert_eq!(index("mlx5_1,mlx5_0", &found), Some(3));
        for other in ["off", "mlx5_1", "mlx5_0:2", "mlx5_0:1:9"] {
            assert_eq!(index(other, &found), None, "{other}");
        }
        let addresses = vec![address(0, &[0xfe, 0x80], false), address(1, &mapped, false)];
        let found = Found { kind: Kind::InfiniBand, lid: 7, addresses, ..found };
        assert_eq!(index("auto", &found), Some(0), "its subnet's own");
    }
}
