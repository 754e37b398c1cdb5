#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/check_budgets reads objects and finds what is over its limit; tools/check_ptx finds each fence that is taken out;
tools/check_ptx_wrappers finds each change of what a wrapper becomes; what tools/mutate_tcgen05, mutate_sm120 and
mutate_clusters change is in the sources, and in the tables of what they say."""
import importlib.machinery
import importlib.util
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def tool(name):
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / 'tools' / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


sys.path.insert(0, str(ROOT / 'tools'))
budgets, ptx, wrappers = tool('check_budgets'), tool('check_ptx'), tool('check_ptx_wrappers')


def elf(parts):
    """An ELF64 file with these sections: (name, type, bytes)."""
    parts = [('', 0, b'')] + parts + [('.shstrtab', 3, b'')]
    names, offsets = b'', []
    for name, _, _ in parts:
        offsets.append(len(names))
        names += name.encode() + b'\0'
    parts[-1] = ('.shstrtab', 3, names)
    body, heads, at = b'', b'', 64
    for offset, (_, kind, data) in zip(offsets, parts):
        size = data if isinstance(data, int) else len(data)
        heads += struct.pack('<IIQQQQIIQQ', offset, kind, 0, 0, at, size, 0, 0, 1, 0)
        if not isinstance(data, int):
            body += data
            at += size
    head = b'\x7fELF\x02\x01\x01' + bytes(9) + struct.pack('<HHIQQQIHHHHHH', 2, 190, 1, 0, 0, at, 0, 64, 0, 0, 64, len(parts), len(parts) - 1)
    return head + body + heads


def cubin(registers, stack, shared):
    name = '_Z4wideILi4EEvPf'
    info = struct.pack('<BBHII', 4, 0x2F, 8, 1, registers) + struct.pack('<BBH', 3, 0x1C, 7) + struct.pack('<BBHII', 4, 0x11, 8, 1, stack)
    symbols = bytes(24) + struct.pack('<IBBHQQ', 1, 0, 0, 0, 0, 0)
    return elf([('.nv.info', 0x70000000, info), ('.symtab', 2, symbols), ('.strtab', 3, b'\0' + name.encode() + b'\0'),
                ('.text.' + name, 1, b'code'), ('.nv.shared.' + name, 8, shared)])


def fatbin(entries, kind=2):
    body = b''
    for architecture, data in entries:
        head = struct.pack('<HHIQ', kind, 0x101, 64, len(data)) + bytes(12) + struct.pack('<I', architecture) + bytes(32)
        body += head + data
    return struct.pack('<IHHQ', 0xBA55ED50, 1, 16, len(body)) + body


class Budgets(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name)

    def build(self, values, room='sm120'):
        path = self.root / 'src/backends/CMakeFiles/kernels.dir' / room / 'maps.cu.o'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(elf([('.text', 1, b'host'), ('.nv_fatbin', 1, fatbin([(a, cubin(*v)) for a, v in values.items()]))]))
        return budgets.found_in(str(self.root))

    def test_objects_are_read(self):
        found = self.build({120: (168, 0, 1024), 121: (170, 8, 2048)})
        self.assertEqual(found, {('backends/sm120/maps.cu', 'wide<4>'): {120: (168, 0, 1024), 121: (170, 8, 2048)}})

    def test_what_is_over_a_limit_is_found(self):
        key = ('backends/sm90/maps.cu', 'wide<4>')
        table = {key: {90: (128, 0, 1024)}}
        self.assertEqual(budgets.compare(table, self.build({90: (128, 0, 1024)}, 'sm90')), [])
        for values, part in (((129, 0, 1024), 'at most 128 registers, found 129'), ((128, 8, 1024), 'at most 0 bytes of stack, found 8'),
                             ((128, 0, 1025), 'at most 1024 bytes of static shared memory, found 1025')):
            faults = budgets.compare(table, self.build({90: values}, 'sm90'))
            self.assertEqual(len(faults), 1)
            self.assertIn(part, faults[0])
        self.assertIn('not in the table', budgets.compare({}, self.build({90: (1, 0, 0)}, 'sm90'))[0])
        self.assertIn('not in the build', budgets.compare({key: {90: (1, 0, 0)}, ('a.cu', 'gone'): {90: (1, 0, 0)}}, self.build({90: (1, 0, 0)}, 'sm90'))[0])

    def test_a_file_may_be_built_for_fewer_architectures_than_others(self):
        portable, own = ('backends/cuda/a.cu', 'k'), ('backends/sm120/a.cu', 'k')
        table = {portable: {90: (1, 0, 0), 120: (1, 0, 0)}, own: {120: (1, 0, 0)}}
        self.assertEqual(budgets.compare(table, {portable: {90: (1, 0, 0)}, own: {120: (1, 0, 0)}}), [])
        self.assertIn('not in the build', budgets.compare(table, {own: {120: (1, 0, 0)}})[0])

    def test_blackwells_kernels_must_not_spill(self):
        found = self.build({120: (168, 8, 0)})
        self.assertIn('must not spill', budgets.compare(found, found)[0])

    def test_code_that_cannot_be_read_is_an_error(self):
        with self.assertRaisesRegex(ValueError, 'compressed'):
            list(budgets.cubins(fatbin([(90, b'(\xb5/\xfd')])))
        with self.assertRaisesRegex(ValueError, 'expected a fat binary'):
            list(budgets.cubins(bytes(64)))
        with tempfile.TemporaryDirectory() as empty:
            result = subprocess.run([ROOT / 'tools/check_budgets', empty], capture_output=True, text=True)
            self.assertEqual(result.returncode, 1)
            self.assertIn('found none', result.stderr)

    def test_the_checked_in_table_is_read(self):
        table = budgets.read_table(budgets.TABLE)
        rooms = {source.split('/')[1] for source, _ in table}
        self.assertLessEqual({'cuda', 'sm90', 'sm100', 'sm120'}, rooms)
        for (source, _), row in table.items():
            if source.startswith(budgets.MUST_NOT_SPILL):
                self.assertTrue(all(values[1] == 0 for values in row.values()), source)
            self.assertTrue(all(0 < values[0] <= 255 for values in row.values()), source)


KERNEL = """
.visible .entry roles(.param .u64 roles_param_0)
{
	.reg .pred 	%p<4>;
	@%p1 bra 	$L__BB0_2;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], %r2;
$L__BB0_2:
	tcgen05.fence::before_thread_sync;
	bar.sync 	0;
	@%p2 bra 	$L__BB0_6;
	// the one that multiplies what another stored
	{
.reg .pred ended;
try_again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%r1], %r2;
@!ended bra try_again;
}
	tcgen05.fence::after_thread_sync;
	tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r0], %rd1, %rd2, %r35, [%r3], [%r4], p;
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];
	bra.uni 	$L__BB0_9;
$L__BB0_6:
	st.shared.v4.b32 [%r7], {%r1, %r2, %r3, %r4};
	@%p3 bra 	$L__BB0_8;
	fence.proxy.async.shared::cta;
	mbarrier.arrive.shared::cta.b64 _, [%r8];
	bra.uni 	$L__BB0_9;
$L__BB0_8:
	fence.proxy.async.shared::cta;
	mbarrier.arrive.shared::cta.b64 _, [%r8];
	{
.reg .pred ended;
try_again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%r1], %r2;
@!ended bra try_again;
}
	tcgen05.fence::after_thread_sync;
	tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%r8];
	tcgen05.wait::ld.sync.aligned;
$L__BB0_9:
	tcgen05.fence::before_thread_sync;
	bar.sync 	0;
	tcgen05.fence::after_thread_sync;
	@%p1 bra 	$L__BB0_10;
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, %r2;
$L__BB0_10:
	ret;
}
"""

# Blocks of a cluster that tell each other, behind another kernel.
CLUSTER = """
.visible .entry tells(.param .u64 tells_param_0)
{
	ld.param.u64 	%rd1, [tells_param_0];
	@%p1 bra 	$L__BB1_2;
	mbarrier.init.shared::cta.b64 [%r1], %r2;
	fence.mbarrier_init.release.cluster;
$L__BB1_2:
	barrier.cluster.arrive.release.aligned;
	barrier.cluster.wait.acquire.aligned;
	@%p2 bra 	$L__BB1_4;
	griddepcontrol.wait;
	griddepcontrol.launch_dependents;
	ld.global.u32 	%r3, [%rd1];
	st.shared.u32 	[%r4], %r3;
	{
.reg .b32 there;
mapa.shared::cluster.u32 there, %r1, %r5;
fence.release.sync_restrict::shared::cta.cluster;
mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];
}
	bra.uni 	$L__BB1_5;
$L__BB1_4:
	{
.reg .pred ended;
try_again: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 ended, [%r1], %r6;
@!ended bra try_again;
fence.acquire.sync_restrict::shared::cluster.cluster;
}
	ld.shared.u32 	%r7, [%r4];
$L__BB1_5:
	ret;
}
"""


# Of a pair: what the odd block's thread passes on, and what its warps give back.
PAIR = """
.visible .entry pair(.param .u64 pair_param_0)
{
	@%p1 bra 	$L__BB2_2;
	tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [%r0], %rd1, %rd2, %r35, [%r3], [%r4], p;
	tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r5], %rs1;
	bra.uni 	$L__BB2_4;
$L__BB2_2:
	{
.reg .pred ended;
try_again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%r1], %r2;
@!ended bra try_again;
}
	@%p2 bra 	$L__BB2_3;
	fence.proxy.async.shared::cta;
	{
.reg .b32 there;
mapa.shared::cluster.u32 there, %r1, %r5;
fence.release.sync_restrict::shared::cta.cluster;
mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];
}
	bra.uni 	$L__BB2_4;
$L__BB2_3:
	tcgen05.fence::after_thread_sync;
	tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%r8];
	tcgen05.wait::ld.sync.aligned;
	tcgen05.fence::before_thread_sync;
	{
.reg .b32 there;
mapa.shared::cluster.u32 there, %r1, %r5;
fence.release.sync_restrict::shared::cta.cluster;
mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];
}
$L__BB2_4:
	ret;
}
"""
RULES = {'fence.proxy': 'proxy', 'before': 'before', 'after': 'after', 'wait::ld': 'loaded'}


class Fences(unittest.TestCase):
    def test_all_fences_in_place(self):
        self.assertEqual(ptx.faults_of(KERNEL)[0], {})

    def test_each_fence_that_is_taken_out_is_found(self):
        lines = KERNEL.split('\n')
        fences = [i for i, line in enumerate(lines) if line.strip().startswith(ptx.FENCES)]
        self.assertEqual(len(fences), 8)
        for i in fences:
            counts, _ = ptx.faults_of('\n'.join(lines[:i] + lines[i + 1:]))
            rule = next(rule for part, rule in RULES.items() if part in lines[i])
            self.assertEqual(set(counts), {('roles', rule)}, lines[i])

    def test_what_blocks_and_kernels_tell_each_other_needs_its_fences(self):
        self.assertEqual(ptx.faults_of(CLUSTER)[0], {})
        lines = CLUSTER.split('\n')
        fences = [i for i, line in enumerate(lines) if line.strip().startswith(ptx.FENCES)]
        self.assertEqual(len(fences), 4)
        rules = {'fence.mbarrier_init': 'init', 'griddepcontrol.wait': 'previous', 'fence.release': 'release', 'fence.acquire': 'acquire'}
        for i in fences:
            rule = next(rules[fence] for fence in rules if lines[i].strip().startswith(fence))
            self.assertEqual(ptx.faults_of('\n'.join(lines[:i] + lines[i + 1:]))[0], {('tells', rule): 1}, lines[i])

    def test_what_a_pairs_odd_block_passes_on_needs_its_fence(self):
        self.assertEqual(ptx.faults_of(PAIR)[0], {})
        proxy, loaded = 'fence.proxy.async.shared::cta;', 'tcgen05.wait::ld.sync.aligned;'
        for old, new, faults in ((proxy, '', {'pass': 1}), (proxy, 'fence.proxy.async.global;', {'pass': 1}),
                                 (proxy, '@%p3 ' + proxy, {'pass': 1}), (proxy, 'fence.proxy.async;', {}),
                                 (loaded, '', {'loaded': 1}), (loaded, '@%p3 ' + loaded, {'loaded': 1}),
                                 (loaded, loaded.replace('::ld', '::st'), {'loaded': 1}),
                                 ('tcgen05.fence::after_thread_sync;', '', {'after': 1, 'pass': 1})):
            found = ptx.faults_of(PAIR.replace(old, new))[0]
            self.assertEqual(found, {('pair', rule): count for rule, count in faults.items()}, new)
        # Who multiplies alone has nobody to pass it on to.
        self.assertEqual(ptx.faults_of(PAIR.replace(proxy, '').replace('cta_group::2', 'cta_group::1'))[0], {})

    def test_a_fence_for_other_memory_does_not_count(self):
        self.assertEqual(ptx.faults_of(KERNEL.replace('fence.proxy.async.shared::cta', 'fence.proxy.async.global'))[0], {('roles', 'proxy'): 2})

    def test_fences_at_the_wrong_place_or_of_a_block_alone_do_not_count(self):
        fence, arrival = 'fence.release.sync_restrict::shared::cta.cluster;\n', 'mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n'
        store, load, wait = '\tst.shared.u32 \t[%r4], %r3;\n', '\tld.global.u32 \t%r3, [%rd1];\n', '\tgriddepcontrol.wait;\n'
        for old, new, rule in ((fence + arrival, fence + store + arrival, 'release'), (fence, 'fence.release.cta;\n', 'release'),
                               ('mbarrier.arrive.relaxed.cluster', 'mbarrier.arrive', 'release'),
                               ('mbarrier.arrive.relaxed.cluster', 'mbarrier.arrive.relaxed.cta', 'release'),
                               ('barrier.cluster.arrive.release', 'barrier.cluster.arrive.relaxed', 'release'),
                               ('.parity.relaxed.cluster', '.parity.relaxed.cta', 'acquire'),
                               ('fence.acquire.sync_restrict::shared::cluster.cluster', 'fence.acquire.cta', 'acquire'),
                               (wait, load + wait, 'previous'), (wait, '\tst.global.u32 \t[%rd1], %r3;\n' + wait, 'previous'),
                               (wait, '\tcp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd1], %r6, [%r1];\n' + wait, 'previous'),
                               (wait, '\tld.u32 \t%r3, [%rd1];\n' + wait, 'previous'),
                               (wait, '\t@%p3 griddepcontrol.wait;\n', 'previous')):
            self.assertIn(old, CLUSTER)
            found = ptx.faults_of(CLUSTER.replace(old, new))[0]
            self.assertEqual(found, {('tells', rule): 1}, new)
        for old, new in ((fence + 'mbarrier.arrive.relaxed', 'mbarrier.arrive.release'), (fence, 'fence.acq_rel.gpu;\n'),
                         (wait, '\tld.shared.u32 \t%r3, [%r4];\n\tprefetch.global.L2 [%rd1];\n' + wait)):
            self.assertEqual(ptx.faults_of(CLUSTER.replace(old, new))[0], {}, new)
        no_grid = CLUSTER.replace(wait, '').replace('\tgriddepcontrol.launch_dependents;\n', '')
        self.assertEqual(ptx.faults_of(no_grid)[0], {})  # a kernel that never overlaps

    def test_stores_that_nothing_asynchronous_reads_are_let_be(self):
        plain = '.visible .entry plain()\n{\n\tst.shared.b32 [%r1], %r2;\n\tbar.sync 0;\n\tret;\n}\n'
        self.assertEqual(ptx.faults_of(plain)[0], {})
        reader = plain.replace('\tret;', '\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1;\n\tret;')
        self.assertEqual(ptx.faults_of(reader)[0], {('plain', 'proxy'): 1})

    def test_what_is_known_is_not_reported_and_more_is(self):
        with tempfile.TemporaryDirectory() as folder:
            path, known = pathlib.Path(folder) / 'a.ptx', pathlib.Path(folder) / 'known.tsv'
            path.write_text(KERNEL.replace('\tfence.proxy.async.shared::cta;\n', ''))
            for count, code in ((2, 0), (1, 1)):
                known.write_text(f'# why\nroles\tproxy\t{count}\ta test\n')
                result = subprocess.run([ROOT / 'tools/check_ptx', path, '--expected', known], capture_output=True, text=True)
                self.assertEqual(result.returncode, code, result.stdout + result.stderr)


PROBE = """
.visible .entry probe(.param .u32 probe_param_0, .param .u64 probe_param_1, .param .u32 probe_param_2)
{
	ld.param.u32 	%r1, [probe_param_0];
	ld.param.u64 	%rd1, [probe_param_1];
	ld.param.u32 	%r2, [probe_param_2];
	cvta.to.shared.u64 	%rd2, %rd1;
	cvt.u32.u64 	%r3, %rd2;
	setp.ne.s32 	%p1, %r2, 0;
	selp.b32 	%r4, 1, 0, %p1;
	{
.reg .pred adds;
setp.ne.b32 adds, %r4, 0;
@adds load.b32 {%r5, %r6}, [%r1], %r3;
}
	cvta.to.global.u64 	%rd3, %rd1;
	st.global.v2.b32 	[%rd3+8], {%r6, %r5};
	ret;
}
"""


class Wrappers(unittest.TestCase):
    def test_registers_are_followed_to_the_parameters(self):
        found = wrappers.found_in(PROBE, {'probe': (['d', 'to', 'adds'], [])})
        self.assertEqual(found, {'probe': ['@adds != 0 load.b32 {t0, t1}, [d], &to', 'store [to+8], {t1, t0}']})
        inverted = wrappers.found_in(PROBE.replace('setp.ne.b32 adds', 'setp.eq.b32 adds'), {'probe': (['d', 'to', 'adds'], [])})
        self.assertIn('@not (adds != 0) load.b32 {t0, t1}, [d], &to', inverted['probe'])

    def test_what_a_wrapper_must_become_is_read(self):
        wanted = {name: value for path in wrappers.PROBES for name, value in wrappers.expectations(path).items()}
        for path in wrappers.PROBES:
            self.assertEqual(len(wrappers.expectations(path)), pathlib.Path(path).read_text().count('\nPROBE '), path)
        self.assertEqual(wanted['cp_pair'], (['to', 'desc'], ['tcgen05.cp.cta_group::2.32x128b.warpx4 [to], desc']))

    @unittest.skipUnless(shutil.which('nvcc'), 'no nvcc: the text of the PTX wrappers is not checked')
    def test_wrappers_are_as_the_isa_has_them_and_each_change_is_found(self):
        self.assertEqual([fault for path in wrappers.PROBES for fault in wrappers.compare(path)], [])
        result = subprocess.run([ROOT / 'tools/check_ptx_wrappers', '--break'], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(result.stdout.count('\n'), len(wrappers.BREAKS) + 2)


class Mutations(unittest.TestCase):
    """Trying them takes hours and is done by hand: what can go stale unnoticed meanwhile is looked at here."""
    TOOLS = {'mutate_tcgen05': 'nvfp4_blackwell_tcgen05.md', 'mutate_sm120': 'nvfp4_blackwell.md',
             'mutate_clusters': 'attention_hopper.md'}

    def test_the_sources_have_what_is_to_be_changed(self):
        for name in self.TOOLS:
            result = subprocess.run([ROOT / 'tools' / name, '--list'], capture_output=True, text=True)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_each_has_its_row_and_its_result(self):
        for name, page in self.TOOLS.items():
            mutations = tool(name).SUITE.mutations
            rows = re.findall(r'^\| (?:\d+ \| )?(.*) \| (.*) \|$', (ROOT / 'docs/kernels' / page).read_text(), re.M)
            said = {broken: words for broken, words in rows if broken in {mutation.name for mutation in mutations}}
            for mutation in mutations:
                self.assertIn(mutation.name, said, page)
                self.assertEqual(said[mutation.name].startswith('survives: '), bool(mutation.excuse), mutation.name)
                if mutation.excuse:
                    self.assertEqual(said[mutation.name], 'survives: ' + mutation.excuse)
            [record] = (ROOT / 'bench/results').glob(f'*-mutations-{name.removeprefix("mutate_")}.json')
            results = {result['broken']: result['is_caught'] for result in json.loads(record.read_text())['results']}
            self.assertEqual(results, {mutation.name: not mutation.excuse for mutation in mutations}, record)


if __name__ == '__main__':
    unittest.main()
