//! The second proof: cotangents against difference quotients of the forward, each alone, and of results without use.

use super::{Call, Global, Standard, whole};
use crate::op;
use crate::ops::Case;
use crate::quotient;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Mesh, Result, World};
use std::panic::Location;

/// Compares the cotangents of a case, on one rank in f64, with central differences of the forward, element by element;
/// those of each argument alone with those of all together; and those of results without use with those of zeros.
///
/// # Errors
/// `Kind::Unsupported` naming the first argument and element that disagree.
#[track_caller]
pub fn gradients(make: impl Fn() -> Case + Sync, standard: &Standard) -> Result<()> {
    let site = Location::caller();
    World::run(Mesh::single(), |rank| {
        let case = make();
        let probe = Probe { call: Call { op: &case.op, rank, is_strided: false, site }, standard };
        for (i, cotangent) in standard.cotangents.iter().enumerate() {
            if let Some(cotangent) = cotangent {
                probe.differences(i, cotangent)?;
                probe.mask(i, cotangent)?;
            }
        }
        (0..standard.seeds.len()).try_for_each(|k| probe.unused(k))
    })?;
    Ok(())
}

/// One case on one rank.
struct Probe<'a> {
    call: Call<'a>,
    standard: &'a Standard,
}

impl Probe<'_> {
    fn wrong<T>(&self, what: String) -> Result<T> {
        Err(Error::new(Kind::Unsupported, format!("{:?}: {what}", self.call.op)))
    }

    fn args(&self, inputs: &[Global]) -> Result<Vec<Tensor>> {
        inputs.iter().map(|g| g.place(self.call.rank, &whole(self.call.rank, g))).collect()
    }

    /// The sum of the products of results and seeds.
    fn loss(&self, inputs: &[Global]) -> Result<f64> {
        let args = self.args(inputs)?;
        let refs: Vec<&Tensor> = args.iter().collect();
        let outputs = op::apply(&**self.call.op, &refs, &[], self.call.site)?;
        let mut loss = 0.0;
        for (y, seed) in outputs.iter().zip(self.standard.seeds.iter().flatten()) {
            loss += y.to_local_f64()?.iter().zip(&seed.data).map(|(y, s)| y * s).sum::<f64>();
        }
        Ok(loss)
    }

    fn differences(&self, i: usize, cotangent: &Global) -> Result<()> {
        let mut inputs = self.standard.inputs.clone();
        let found = quotient::disagreement(&cotangent.data, |at, by| {
            let x = inputs[i].data[at];
            inputs[i].data[at] = x + by;
            let loss = self.loss(&inputs);
            inputs[i].data[at] = x;
            loss
        })?;
        match found {
            None => Ok(()),
            Some((at, claimed, quotient)) => {
                self.wrong(format!("cotangent {i} is {claimed} at element {at}, differences say {quotient}"))
            }
        }
    }

    fn mask(&self, i: usize, cotangent: &Global) -> Result<()> {
        let args = self.args(&self.standard.inputs)?;
        let only: Vec<bool> = (0..args.len()).map(|k| k == i).collect();
        let cotangents = self.call.run(&args, &self.standard.seeds, Some(&only))?.cotangents;
        for (k, alone) in cotangents.into_iter().flatten().enumerate() {
            let same = match &alone {
                None => k != i,
                Some(alone) => k == i && cotangent.differs(alone, 0.0, self.call.site)?.is_none(),
            };
            if !same {
                return self.wrong(format!("asked for cotangent {i} alone, the vjp gives {alone:?} for {k}"));
            }
        }
        Ok(())
    }

    fn unused(&self, k: usize) -> Result<()> {
        let args = self.args(&self.standard.inputs)?;
        let mut seeds = self.standard.seeds.clone();
        seeds[k] = seeds[k].take().map(|s| Global { data: vec![0.0; s.data.len()], ..s });
        let zeros = self.call.run(&args, &seeds, None)?.cotangents;
        seeds[k] = None;
        let unused = self.call.run(&args, &seeds, None)?.cotangents;
        for (zero, none) in zeros.into_iter().flatten().zip(unused.into_iter().flatten()) {
            let (Some(zero), Some(none)) = (zero, none) else { continue };
            let zero = Global::of(zero.layout(), zero.to_local_f64()?);
            if let Some(found) = zero.differs(&none, 0.0, self.call.site)? {
                return self
                    .wrong(format!("with result {k} unused a cotangent {found}, the value for zeros"));
            }
        }
        Ok(())
    }
}
