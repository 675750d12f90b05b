//! Ranks that are absent, late or silent, which others find by waiting for timeouts. The tests wait side by side, and are the first by
//! name: together they take the ten seconds of the longest, and others run meanwhile.

use crate::support::in_parallel;
use crate::{async_calls, faults, processes};

#[test]
fn failures_that_are_found_by_waiting() {
    let cases: [fn(); 10] = [
        processes::unresponsive_or_malformed_peer_is_lost_despite_a_long_timeout,
        processes::timeout_names_a_peer_without_heartbeats,
        processes::missing_ranks_are_named_on_all_others,
        processes::port_in_use_is_named,
        processes::rank_zero_behind_a_virtual_address_listens_where_it_is_told_to,
        processes::ranks_that_return_early_report_later_failures,
        processes::failure_of_all_processes_is_reported_by_one,
        async_calls::queued_call_has_the_timeout_of_its_issue,
        faults::with_timeout_extends_the_timeout_only_inside_the_closure,
        faults::timeout_names_absent_ranks_and_their_calls,
    ];
    in_parallel(cases, |case| case());
}
