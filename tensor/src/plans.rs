//! Plans of ops of which nothing but the type and the signature decides: found by the handles of the layouts, without asking the op.
//!
//! As in `memo`, a plan is handed out only for what equals that which it was made for.

use crate::infer::Inference;
use crate::layout::Layout;
use crate::memo::Mix;
use crate::recent::Recent;
use smallvec::SmallVec;
use std::any::TypeId;
use std::hash::{Hash, Hasher};
use std::rc::Rc;

/// The type of an op, and where its signature stands for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// Address and length: one text that stands twice is planned twice, and no other can come to stand there.
    signature: (usize, usize),
    op: TypeId,
}

impl Fixed {
    /// Of an op of this type with a signature.
    #[must_use]
    pub fn of<O: 'static>(signature: &'static str) -> Fixed {
        Fixed { signature: (signature.as_ptr().addr(), signature.len()), op: TypeId::of::<O>() }
    }

    /// Of an op without fields. It has no text of its own to lend, so that its signature stands for good, too.
    pub(crate) fn of_unit<O: ?Sized + 'static>(op: &O, signature: &str) -> Option<Fixed> {
        let signature = (signature.as_ptr().addr(), signature.len());
        (size_of_val(op) == 0).then(|| Fixed { signature, op: TypeId::of::<O>() })
    }
}

/// A plan, and what it was made for. It keeps the layouts alive, so that no others can take their addresses.
struct Plan {
    fixed: Fixed,
    args: SmallVec<[Layout; 2]>,
    inference: Rc<Inference>,
}

/// What one rank has planned last.
#[derive(Debug, Default)]
pub(crate) struct Plans(Recent<Plan>);

impl Plans {
    /// The plan of an op on some layouts, if it was made not long ago.
    pub(crate) fn find(&self, fixed: Fixed, args: &[&Layout]) -> Option<Rc<Inference>> {
        let is = |plan: &Plan| {
            plan.args.len() == args.len()
                && plan.args.iter().zip(args).all(|(known, asked)| known == *asked)
                && plan.fixed == fixed
        };
        self.0.find(place(fixed, args), |plan| is(plan).then(|| plan.inference.clone()))
    }

    /// Keeps a plan in the place of another.
    pub(crate) fn keep(&self, fixed: Fixed, args: &[&Layout], inference: &Rc<Inference>) {
        let layouts = args.iter().map(|l| (*l).clone()).collect();
        let plan = Plan { fixed, args: layouts, inference: inference.clone() };
        self.0.keep(place(fixed, args), &Rc::new(plan));
    }
}

// The handles are joined before they are mixed: whoever plans waits for this number.
fn place(fixed: Fixed, args: &[&Layout]) -> u64 {
    let mut mix = Mix::default();
    fixed.op.hash(&mut mix);
    mix.write_usize(args.iter().fold(fixed.signature.0, |joined, l| joined.rotate_left(9) ^ l.address()));
    mix.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::Mesh;

    #[test]
    fn every_part_counts() {
        struct First;
        struct Second;
        let mesh = Mesh::parse("a=2").unwrap();
        let [x, y] = ["f32[4]", "f32[4@a]"].map(|text| Layout::parse(text, &mesh).unwrap());
        let (one, two) = ("..m, ..m -> ..m", "..m d, d -> ..m d");
        let asked = [
            (Fixed::of::<First>(one), vec![&x, &x]),
            (Fixed::of::<Second>(one), vec![&x, &x]),
            (Fixed::of::<First>(two), vec![&x, &x]),
            (Fixed::of::<First>(one), vec![&x, &y]),
            (Fixed::of::<First>(one), vec![&x]),
        ];
        for (i, (fixed, args)) in asked.iter().enumerate() {
            let layouts = args.iter().map(|l| (*l).clone()).collect();
            let inference = Rc::new(Inference::direct(args.len(), []));
            let plan = Rc::new(Plan { fixed: *fixed, args: layouts, inference });
            for (j, (fixed, args)) in asked.iter().enumerate() {
                // At the place where it is looked for.
                let plans = Plans::default();
                plans.0.keep(place(*fixed, args), &plan);
                assert_eq!(plans.find(*fixed, args).is_some(), i == j, "plan {i} for question {j}");
            }
        }
    }
}
