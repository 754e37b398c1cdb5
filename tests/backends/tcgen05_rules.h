// SPDX-License-Identifier: Apache-2.0
#pragma once
// A product on a GPU that has tcgen05 in software (TESSERA_SM100_EMULATED), sound or with one rule broken.

namespace tessera::testing {

enum class BrokenRule {
  kNone,
  kReservedBits,  // of the instruction descriptor
  kStride,        // of a shared memory descriptor
  kColumns,       // sums in columns that are not allocated
  kScaleColumns,  // scales in such
  kOverlap,       // sums and scales in the same columns
  kNoScalesOfA,   // scales that were not copied
  kNoScalesOfB,
  kAddsToNothing,      // the first product adds
  kOtherLanes,         // a warp loads another's lanes
  kNoWaitForProducts,  // loads sums that are not there yet
  kBeginsAnew,         // a second product in place of sums that nobody has loaded
  kNoWaitForLoad,      // a second product while a load is under way
  kScalesOverSums,     // copies scales to columns of sums
  kTwoIssuers,
  kNoPair,        // cta_group::2 in a launch without clusters
  kDealloc,       // gives other columns back than it got
  kMissingBytes,  // a barrier expects more bytes than are copied: waits 20 seconds
  // Of a pair alone; "odd" is its odd block.
  kOddCopies,        // issues a copy of scales
  kOddMultiplies,    // a product
  kOddCommits,       // a commit
  kRowsOfOneBlock,   // a product of 128 rows
  kColumnsInEights,  // a product of N = 8 more
  kBothGroups,       // scales are copied in the even block alone, by cta_group::1
  kScalesOfFewer,    // scales of the first 128 columns of N alone
  kOddScales,        // has one other scale of B
  kOddHasLess,       // has allocated fewer columns
  kOddIsEarly,       // loads sums that are not there yet
  kOddLeavesSums,    // does not load what the next product begins anew
  kOddIsLoading,     // has not waited for its loads when the next product is issued
  kTellsNobody,      // commits for a block that the cluster lacks
  kOddKeepsBack,     // does not say that its part has come: the even block waits 20 seconds
};

// Starts it on the current GPU, in one block or in a pair of a cluster's, and waits; false: it was refused, and the
// GPU's context is lost.
bool obeys_rules(BrokenRule rule, int num_blocks);

}  // namespace tessera::testing
