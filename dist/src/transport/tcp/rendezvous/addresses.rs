//! The address of rank 0: where it listens, and where the other ranks connect to.

use crate::process::Process;
use std::io::{Error, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};

/// An address of the range for documentation, to which nothing is sent.
const ELSEWHERE: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 9);

/// Resolves the host of rank 0. On one of several machines, an alias of the loopback interface is replaced by the address of this
/// machine in the network: Debian lets the name of a machine mean 127.0.1.1 on that machine, and there only.
pub(super) fn of_rank_zero(process: &Process) -> std::io::Result<Vec<SocketAddr>> {
    let known = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let is_alias = |ip: IpAddr| {
        ip.is_unspecified() || ip.is_loopback() && !known.contains(&ip) && !process.is_on_one_machine()
    };
    let mut found = Vec::new();
    for address in (process.host(), process.port()).to_socket_addrs()? {
        let ip = if is_alias(address.ip()) { in_network()? } else { address.ip() };
        let address = if ip == address.ip() { address } else { SocketAddr::new(ip, address.port()) };
        if !found.contains(&address) {
            found.push(address);
        }
    }
    match found.is_empty() {
        true => Err(Error::other("the host name has no address")),
        false => Ok(found),
    }
}

/// The addresses at which rank 0 listens: those of its host, or the address of `--listen`.
pub(super) fn of_listener(process: &Process) -> std::io::Result<Vec<SocketAddr>> {
    match process.listen_host() {
        Some(host) => (host, process.port()).to_socket_addrs().map(Iterator::collect),
        None => of_rank_zero(process),
    }
}

/// The address from which this machine reaches others.
fn in_network() -> std::io::Result<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // A datagram socket only looks up the route.
    socket.connect(ELSEWHERE)?;
    Ok(socket.local_addr()?.ip())
}

/// Listens at the first address that is one of this machine.
pub(super) fn listen(addresses: &[SocketAddr]) -> std::io::Result<TcpListener> {
    let mut failed = Error::other("the host name has no address");
    for address in addresses {
        match TcpListener::bind(address) {
            Err(e) if e.kind() != ErrorKind::AddrNotAvailable => return Err(e),
            Err(e) => failed = e,
            listening => return listening,
        }
    }
    Err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_zero_listens_on_the_address_of_its_host_only() {
        for host in ["127.0.0.1", "localhost", "127.0.0.2"] {
            let process = Process::new(0, 2, host, 0).unwrap();
            let addresses = of_rank_zero(&process).unwrap();
            let listening = listen(&addresses).unwrap().local_addr().unwrap();
            assert!(listening.ip().is_loopback() && addresses.iter().any(|a| a.ip() == listening.ip()));
        }
        // An address of no interface of this machine.
        let elsewhere = SocketAddr::from((ELSEWHERE.0, 0));
        let forwarded = Process::new(0, 2, &ELSEWHERE.0.to_string(), 0).unwrap();
        assert_eq!(of_listener(&forwarded).unwrap(), [elsewhere]);
        let listening = listen(&of_listener(&forwarded.listen("127.0.0.1")).unwrap()).unwrap();
        assert!(listening.local_addr().unwrap().ip().is_loopback());
        assert_eq!(listen(&[elsewhere]).unwrap_err().kind(), ErrorKind::AddrNotAvailable);
        let apart = Process::new(0, 2, "0.0.0.0", 0).unwrap().with_local_rank(0, 1).unwrap();
        // A machine without a route has no such address.
        assert!(
            of_rank_zero(&apart).is_ok_and(|all| all.iter().all(|a| !a.ip().is_unspecified()))
                || in_network().is_err()
        );
    }
}
