//! One issue order of the calls that ranks are about to make, compared between the ranks of a running world.

use super::Rank;
use crate::call::{Call, IssuedCall, Origin, Phase, hash_bytes};
use crate::encoding::{Decoder, Encoder};
use crate::error::{Error, Kind, Result};
use crate::issue_order::{issued_calls, simulate};
use crate::trace::Record;
use shardgrad_kernels::{DType, download, upload};
use std::panic::Location;

/// The number that stands for the length of a missing trace.
const NO_TRACE: i64 = -1;

impl Rank {
    /// Checks that the calls that all ranks of the world are about to make match and have one order over all groups
    /// ([`check_issue_order`](crate::check_issue_order)), from the trace of a [dry twin](Rank::dry_twin) of each. Returns whether this is
    /// proved: without the trace of some rank (`None`) nothing is compared. A collective call: every rank of the world calls it
    /// together.
    ///
    /// Costs an all-gather of 16 bytes per rank. Where traces differ or contain messages, also an all-gather of the distinct traces, a
    /// simulation on rank 0, and an all-gather of 16 bytes per rank for its result.
    ///
    /// # Errors
    /// Those of [`check_issue_order`](crate::check_issue_order), on every rank; errors of the collectives.
    pub fn check_issue_order(
        &self,
        trace: Option<&[Record]>,
        site: &'static Location<'static>,
    ) -> Result<bool> {
        let rank = self.world();
        let num_ranks = rank.mesh().num_ranks();
        if num_ranks == 1 || rank.is_dry_run() {
            return Ok(false);
        }
        let mut own = Encoder::default();
        let calls = trace.map(issued_calls);
        calls.iter().flatten().for_each(|call| call.encode(&mut own));
        let len = if calls.is_some() { own.0.len() as i64 } else { NO_TRACE };
        let keys = rank.gather_words([hash_bytes(&own.0) as i64, len], site)?;
        if keys.iter().any(|[_, len]| *len == NO_TRACE) {
            return Ok(false);
        }
        let has_messages = calls.iter().flatten().any(|call| !call.op.is_collective());
        // Ranks with one trace of collectives go on together. Whether a trace has messages follows from its key.
        if !has_messages && keys.iter().all(|key| *key == keys[0]) {
            return Ok(true);
        }
        let firsts: Vec<usize> = (0..num_ranks)
            .filter(|rank| keys.iter().position(|key| *key == keys[*rank]) == Some(*rank))
            .collect();
        let sent = |rank: usize| if firsts.contains(&rank) { keys[rank][1] as usize } else { 0 };
        let counts: Vec<usize> = (0..num_ranks).map(sent).collect();
        let traces = rank.gather_bytes(&own.0[..counts[rank.index()]], &counts, site)?;
        let result = match rank.index() {
            0 => rank.simulate_traces(&traces, &firsts, &keys),
            _ => Ok(()),
        };
        rank.share_result(result, site).map(|()| true)
    }

    /// Simulates the gathered traces, of the first rank of each key.
    fn simulate_traces(&self, mut traces: &[u8], firsts: &[usize], keys: &[[i64; 2]]) -> Result<()> {
        let mut distinct: Vec<Vec<IssuedCall>> = Vec::with_capacity(firsts.len());
        for first in firsts {
            let (own, rest) = traces.split_at_checked(keys[*first][1] as usize).unwrap_or_default();
            let (mut from, mut calls) = (Decoder(own), Vec::new());
            while !from.0.is_empty() {
                calls.push(IssuedCall::decode(&mut from, self.mesh()).ok_or_else(malformed)?);
            }
            distinct.push(calls);
            traces = rest;
        }
        let of_key = |key: &[i64; 2]| {
            let found = firsts.iter().position(|first| keys[*first] == *key);
            &*distinct[found.expect("bug: a key without a first rank")]
        };
        simulate(self.mesh(), &keys.iter().map(of_key).collect::<Vec<_>>())
    }

    /// Returns the result of rank 0 on every rank.
    fn share_result(&self, result: Result<()>, site: &'static Location<'static>) -> Result<()> {
        let mut own = Encoder::default();
        if let Err(error) = &result {
            error.encode(&mut own);
        }
        let words = self.gather_words([own.0.len() as i64, 0], site)?;
        let len = words[0][0] as usize;
        if len == 0 {
            return Ok(());
        }
        let mut counts = vec![0; words.len()];
        counts[0] = len;
        let bytes = self.gather_bytes(&own.0, &counts, site)?;
        result.and_then(|()| Err(Error::decode(&mut Decoder(&bytes)).unwrap_or_else(malformed)))
    }

    /// Gathers two numbers of every rank of the world.
    fn gather_words(&self, words: [i64; 2], site: &'static Location<'static>) -> Result<Vec<[i64; 2]>> {
        let num_ranks = self.mesh().num_ranks();
        let own = upload(&**self.backend(), &words)?;
        let all = self.all_gather(&self.world_call(DType::I64, site), &own, &vec![2; num_ranks])?;
        let all = download::<i64>(&**self.backend(), &all, 2 * num_ranks)?;
        Ok(all.as_chunks().0.to_vec())
    }

    /// Gathers the bytes of every rank of the world, as many as `counts` states.
    fn gather_bytes(
        &self,
        own: &[u8],
        counts: &[usize],
        site: &'static Location<'static>,
    ) -> Result<Vec<u8>> {
        let own = upload(&**self.backend(), own)?;
        let all = self.all_gather(&self.world_call(DType::U8, site), &own, counts)?;
        Ok(download(&**self.backend(), &all, counts.iter().sum())?)
    }

    fn world_call(&self, dtype: DType, site: &'static Location<'static>) -> Call<'static> {
        let axes = self.mesh().axes().filter(|axis| self.mesh().size(*axis) > 1).collect();
        Call { axes, dtype, phase: Phase::Control, path: "issue order", origin: Origin::default(), site }
    }
}

fn malformed() -> Error {
    Error::new(Kind::Collective, "a rank sent a trace of its calls that cannot be read")
        .detail("help", "start all processes from the same build")
}
