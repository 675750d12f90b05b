//! A cache of op plans for ops whose plan depends only on their type, signature and argument layouts: found by the
//! addresses of the layouts, without calling the op.
//!
//! As in `inference_cache`, a plan is returned only for a key that equals the stored key.

use crate::execution::direct_mapped_cache::DirectMappedCache;
use crate::layout::Layout;
use crate::layout::fast_hasher::FastHasher;
use crate::layout::infer::Inference;
use smallvec::SmallVec;
use std::any::TypeId;
use std::hash::{Hash, Hasher};
use std::rc::Rc;

/// The key of a cached plan: the type of an op, and two numbers that determine all else that its plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanKey {
    /// Address and length of the signature text, which is never freed (equal texts at two addresses are planned twice, which is
    /// correct), or numbers that the op chooses.
    fields: (usize, usize),
    /// The shape of the output where the op states one, as one number; else 0.
    shape: u64,
    op: TypeId,
}

impl PlanKey {
    /// The key of an op of type `O` with a static signature.
    #[must_use]
    pub fn of<O: 'static>(signature: &'static str) -> PlanKey {
        PlanKey { fields: (signature.as_ptr().addr(), signature.len()), shape: 0, op: TypeId::of::<O>() }
    }

    /// The key of an op of type `O` whose signature and dtypes are determined by two numbers.
    #[must_use]
    pub fn of_fields<O: 'static>(first: usize, second: usize) -> PlanKey {
        PlanKey { fields: (first, second), shape: 0, op: TypeId::of::<O>() }
    }

    /// The key of an op whose plan depends on a shape too; `None` for shapes that do not fit into one number: of more than three dims, or
    /// with a dim of 65536 elements or more.
    #[must_use]
    pub(crate) fn with_shape(self, shape: &[usize]) -> Option<PlanKey> {
        // The first bit states the number of dims.
        let append =
            |packed: u64, extent: &usize| Some(packed << 16 | u64::from(u16::try_from(*extent).ok()?));
        let shape = (shape.len() <= 3).then(|| shape.iter().try_fold(1, append)).flatten()?;
        Some(PlanKey { shape, ..self })
    }

    /// The key of an op without fields, `None` for others. Such an op owns no text, so its signature is static.
    pub(crate) fn of_unit<O: ?Sized + 'static>(op: &O, signature: &str) -> Option<PlanKey> {
        let fields = (signature.as_ptr().addr(), signature.len());
        (size_of_val(op) == 0).then(|| PlanKey { fields, shape: 0, op: TypeId::of::<O>() })
    }
}

/// A cached plan with its key. It keeps the layouts alive, so that no other layouts get their addresses.
pub(crate) struct CachedPlan {
    key: PlanKey,
    args: SmallVec<[Layout; 2]>,
    /// The layouts that a vjp states about the outputs.
    want: SmallVec<[Option<Layout>; 1]>,
    inference: Rc<Inference>,
}

/// The cached plans of one rank.
#[derive(Debug, Default)]
pub(crate) struct PlanCache(DirectMappedCache<CachedPlan>);

impl PlanCache {
    /// Returns the cached plan of an op on some layouts, with the stated layouts of outputs.
    pub(crate) fn get(
        &self,
        key: PlanKey,
        args: &[&Layout],
        want: &[Option<Layout>],
    ) -> Option<Rc<Inference>> {
        let is = |plan: &CachedPlan| {
            plan.args.len() == args.len()
                && plan.args.iter().zip(args).all(|(known, asked)| known == *asked)
                && *plan.want == *want
                && plan.key == key
        };
        self.0.get(slot_hash(key, args, want), |plan| is(plan).then(|| plan.inference.clone()))
    }

    /// Returns the plans of all slots.
    #[cfg(test)]
    pub(crate) fn plans(&self) -> Vec<Rc<CachedPlan>> {
        self.0.values()
    }

    /// Stores a plan, replacing the old plan of its slot.
    pub(crate) fn insert(
        &self,
        key: PlanKey,
        args: &[&Layout],
        want: &[Option<Layout>],
        inference: &Rc<Inference>,
    ) {
        let layouts = args.iter().map(|l| (*l).clone()).collect();
        let plan = CachedPlan { key, args: layouts, want: want.into(), inference: inference.clone() };
        self.0.insert(slot_hash(key, args, want), &Rc::new(plan));
    }
}

// The addresses are combined before they are hashed, which shortens the critical path: planning waits for this number.
fn slot_hash(key: PlanKey, args: &[&Layout], want: &[Option<Layout>]) -> u64 {
    let mut hasher = FastHasher::default();
    key.op.hash(&mut hasher);
    let first = key.fields.0.rotate_left(3) ^ key.fields.1 ^ key.shape as usize;
    let layouts = args.iter().copied().chain(want.iter().flatten());
    hasher.write_usize(layouts.fold(first, |joined, l| joined.rotate_left(9) ^ l.address()));
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::Mesh;

    #[test]
    fn every_part_of_the_key_is_compared() {
        struct First;
        struct Second;
        let mesh = Mesh::parse("a=2").unwrap();
        let [x, y] = ["f32[4]", "f32[4@a]"].map(|text| Layout::parse(text, &mesh).unwrap());
        let (one, two) = ("..m, ..m -> ..m", "..m d, d -> ..m d");
        let shaped = |shape: &[usize]| PlanKey::of::<First>(one).with_shape(shape).unwrap();
        let asked = [
            (PlanKey::of::<First>(one), vec![&x, &x], vec![]),
            (PlanKey::of::<Second>(one), vec![&x, &x], vec![]),
            (PlanKey::of::<First>(two), vec![&x, &x], vec![]),
            (PlanKey::of::<First>(one), vec![&x, &y], vec![]),
            (PlanKey::of::<First>(one), vec![&x], vec![]),
            (PlanKey::of_fields::<First>(1, 2), vec![&x, &x], vec![]),
            (PlanKey::of_fields::<First>(1, 3), vec![&x, &x], vec![]),
            (PlanKey::of_fields::<First>(2, 2), vec![&x, &x], vec![]),
            (PlanKey::of::<First>(one), vec![&x, &x], vec![Some(x.clone())]),
            (PlanKey::of::<First>(one), vec![&x, &x], vec![Some(y.clone())]),
            (PlanKey::of::<First>(one), vec![&x, &x], vec![None]),
            (shaped(&[]), vec![&x, &x], vec![]),
            (shaped(&[4]), vec![&x, &x], vec![]),
            (shaped(&[0, 4]), vec![&x, &x], vec![]),
            (shaped(&[4, 0]), vec![&x, &x], vec![]),
        ];
        for (i, (key, args, want)) in asked.iter().enumerate() {
            let layouts = args.iter().map(|l| (*l).clone()).collect();
            let inference = Rc::new(Inference::direct(args.len(), []));
            let want = want.as_slice().into();
            let plan = Rc::new(CachedPlan { key: *key, args: layouts, want, inference });
            for (j, (key, args, want)) in asked.iter().enumerate() {
                // In the slot where it is looked up.
                let cache = PlanCache::default();
                cache.0.insert(slot_hash(*key, args, want), &plan);
                assert_eq!(cache.get(*key, args, want).is_some(), i == j, "plan {i} for key {j}");
            }
        }
    }

    #[test]
    fn shapes_that_do_not_fit_into_a_number_have_no_key() {
        struct Op;
        let key = PlanKey::of::<Op>("..m -> ..m");
        for shape in [&[1, 2, 3, 4][..], &[1 << 16]] {
            assert_eq!(key.with_shape(shape), None, "{shape:?}");
        }
        assert!(key.with_shape(&[65535; 3]).is_some());
    }
}
