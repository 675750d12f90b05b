//! Ranks as threads and as processes: every collective against a plain specification, every way to misuse them, and the
//! promises on determinism and dry runs.

mod collectives;
mod dry;
mod faults;
mod launch;
mod marks;
mod messages;
mod origins;
mod rendezvous;
mod processes;
mod programs;
mod random;
mod sizes;
mod support;
