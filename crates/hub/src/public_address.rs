//! Addresses of the internet, apart from the ones of local networks and of the machine itself.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Addresses with the same first `bits`.
struct Network<A> {
    address: A,
    bits: u32,
}

const fn v4(a: u8, b: u8, c: u8, bits: u32) -> Network<Ipv4Addr> {
    Network { address: Ipv4Addr::new(a, b, c, 0), bits }
}

const fn v6(a: u16, b: u16, bits: u32) -> Network<Ipv6Addr> {
    Network { address: Ipv6Addr::new(a, b, 0, 0, 0, 0, 0, 0), bits }
}

/// Networks of IPv4 that are not global, by IANA's registry of special-purpose addresses.
const SPECIAL_V4: [Network<Ipv4Addr>; 15] = [
    // This network, with the unspecified address.
    v4(0, 0, 0, 8),
    // Private, and shared by the customers of a provider.
    v4(10, 0, 0, 8),
    v4(100, 64, 0, 10),
    v4(172, 16, 0, 12),
    v4(192, 168, 0, 16),
    // Loopback and link-local.
    v4(127, 0, 0, 8),
    v4(169, 254, 0, 16),
    // Protocols, and relays of 6to4.
    v4(192, 0, 0, 24),
    v4(192, 88, 99, 24),
    // Documentation.
    v4(192, 0, 2, 24),
    v4(198, 51, 100, 24),
    v4(203, 0, 113, 24),
    // Benchmarks.
    v4(198, 18, 0, 15),
    // Multicast; reserved, with broadcast.
    v4(224, 0, 0, 4),
    v4(240, 0, 0, 4),
];

/// Unicast addresses of IPv6. All others are local, multicast, reserved, or have one of IPv4.
const UNICAST_V6: Network<Ipv6Addr> = v6(0x2000, 0, 3);

/// Networks among them that are not global.
const SPECIAL_V6: [Network<Ipv6Addr>; 4] = [
    // Protocols: Teredo, benchmarks, identifiers.
    v6(0x2001, 0, 23),
    // Documentation.
    v6(0x2001, 0xdb8, 32),
    v6(0x3fff, 0, 20),
    // 6to4.
    v6(0x2002, 0, 16),
];

/// Addresses that a translator maps to the one of IPv4 in their last bits.
const TRANSLATED: Network<Ipv6Addr> = v6(0x64, 0xff9b, 96);

impl Network<Ipv4Addr> {
    fn has(&self, address: Ipv4Addr) -> bool {
        (address.to_bits() ^ self.address.to_bits()).leading_zeros() >= self.bits
    }
}

impl Network<Ipv6Addr> {
    fn has(&self, address: Ipv6Addr) -> bool {
        (address.to_bits() ^ self.address.to_bits()).leading_zeros() >= self.bits
    }
}

/// Whether an address is one of the internet.
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) if TRANSLATED.has(address) => {
            let [.., a, b, c, d] = address.octets();
            is_public_v4(Ipv4Addr::new(a, b, c, d))
        }
        IpAddr::V6(address) => {
            UNICAST_V6.has(address) && !SPECIAL_V6.iter().any(|network| network.has(address))
        }
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !SPECIAL_V4.iter().any(|network| network.has(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_internet_are_public() {
        let check = |addresses: &[&str], expected: bool| {
            for address in addresses {
                assert_eq!(is_public(address.parse().unwrap()), expected, "{address}");
            }
        };
        // The networks themselves, with their neighbours.
        check(
            &[
                "1.0.0.0",
                "9.255.255.255",
                "11.0.0.0",
                "100.63.255.255",
                "100.128.0.0",
                "126.255.255.255",
                "128.0.0.0",
                "169.253.255.255",
                "169.255.0.0",
                "172.15.255.255",
                "172.32.0.0",
                "191.255.255.255",
                "192.0.1.0",
                "192.0.3.0",
                "192.88.98.255",
                "192.88.100.0",
                "192.167.255.255",
                "192.169.0.0",
                "198.17.255.255",
                "198.20.0.0",
                "198.51.99.255",
                "198.51.101.0",
                "203.0.112.255",
                "203.0.114.0",
                "223.255.255.255",
                "93.184.215.14",
            ],
            true,
        );
        check(
            &[
                "0.0.0.0",
                "0.255.255.255",
                "10.0.0.0",
                "10.255.255.255",
                "100.64.0.0",
                "100.127.255.255",
                "127.0.0.1",
                "127.255.255.255",
                "169.254.169.254",
                "172.16.0.0",
                "172.31.255.255",
                "192.0.0.8",
                "192.0.2.255",
                "192.88.99.1",
                "192.168.0.1",
                "192.168.255.255",
                "198.18.0.0",
                "198.19.255.255",
                "198.51.100.7",
                "203.0.113.7",
                "224.0.0.1",
                "239.255.255.255",
                "240.0.0.1",
                "255.255.255.255",
            ],
            false,
        );
        check(&["2001:200::1", "2003::1", "2606:4700::1111", "2a00::1", "3ffe::1"], true);
        check(
            &[
                "::",
                "::1",
                "::93.184.215.14",
                "::ffff:93.184.215.14",
                "::ffff:10.0.0.1",
                "::ffff:0:127.0.0.1",
                "64:ff9b:1::1",
                "100::1",
                "1fff::1",
                "2001::1",
                "2001:2::1",
                "2001:1ff:ffff::1",
                "2001:db8::1",
                "2002:5db8:d70e::1",
                "2002:7f00:1::",
                "3fff::1",
                "3fff:fff::1",
                "4000::1",
                "5f00::1",
                "fc00::1",
                "fd00:ec2::254",
                "fe80::1",
                "fec0::1",
                "ff02::1",
            ],
            false,
        );
        // A translator reaches the address in the last bits.
        check(&["64:ff9b::93.184.215.14"], true);
        check(&["64:ff9b::127.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b::"], false);
    }
}
