//! Tests of worlds of threads and of processes: every collective against a plain reference, errors for every kind of misuse,
//! determinism, and dry runs.

mod collectives;
mod canonical_sums;
mod async_calls;
mod issue_order;
mod dry;
mod faults;
mod launch;
mod stream_order;
mod messages;
mod strangers;
mod tampering;
mod origins;
mod rendezvous;
mod processes;
mod random_programs;
mod random_collectives;
mod payload_sizes;
mod absent_ranks;
mod support;
mod wire;
