"""Text that no model was trained on, to judge quantised weights by.

Origin: written for this repository, and published nowhere before; it is under the repository's
licence. It mixes what a general model meets: prose, explanation, dialogue, a recipe, a letter,
minutes, code.
"""

HELD_OUT = """\
The ferry to Hallow Island left twice a day in winter, once before the light came and once after
it had gone. Marit preferred the early one. At that hour the deck was empty except for the mail
sacks and the two brothers who repaired lobster pots, and nobody asked her what she was carrying
in the long wooden case. It held a barometer. Her grandfather had bought it from a bankrupt
shipping office in the year of the great frost, and it had hung beside his stove ever since,
predicting storms with the slow confidence of a very old dog. Now the needle had stopped. It stood
at a pressure that would have meant a hurricane, and it stood there through a week of mild fog.
The only person on the coast who still understood such things was a retired lighthouse keeper with
bad hearing and an excellent set of screwdrivers, and he had not answered his telephone since
October.

When she knocked, the door opened so quickly that she wondered whether he had been standing behind
it. He looked at the case, not at her. "Aneroid," he said, "brass, nine inches, with a cracked
capsule. You can hear it when you walk." She had heard nothing. He took it to a bench under the
window, removed the glass with a movement of his thumb, and began to explain why a sealed box with
almost no air in it will grow thinner when the weather is fine and thicker when it is not. The
explanation took an hour, and the repair took ten minutes. He would not accept money. He asked
instead that she come back in spring and tell him what it had said, and whether it had been right.

A short account of why bridges sing. Any long structure has a set of frequencies at which it likes
to move, and a wind that blows steadily across a cable sheds small whirls from it, first on one
side and then on the other. If the rhythm of those whirls comes close to a frequency that the
cable prefers, each push arrives just as the cable is ready to be pushed, and the motion builds.
Engineers have three answers. They can make the cable heavier or tighter, so that its frequency
lies elsewhere. They can wrap a thin spiral around it, which makes the whirls leave at different
moments along its length, so that their pushes cancel. Or they can fasten a damper near its end,
which turns motion into heat. The second answer costs the least, and for that reason a great many
cables that look smooth from the road turn out, on closer inspection, to be wearing a narrow ridge
like a barber's pole. Nothing prevents the sound entirely. On a clear evening in March, with the
right breeze, people who live near the estuary still open their windows to listen.

"You have been measuring the wrong thing," said Oduya. "You count how many letters are delivered
in a day, and you are proud because the number rises. But nobody writes to us to complain about
the number."

"What do they complain about?"

"About the one letter that came late. A thousand people receive their post by nine, and they do
not notice it, because it is what post is for. One woman waits until four for a letter from the
hospital. She notices. She tells her sister. If you want to know how well this office works, do
not show me the average. Show me the worst letter of each day, and tell me why it was the worst."

The postmaster turned the pages of his ledger for some time. "On Tuesday," he said at last, "it
was the dog in Pell Street."

"And on Wednesday?"

"Also the dog."

"Then we have learned more in one minute than your averages taught us in a year."

Barley soup with lemon. For four people you need a cup of pearl barley, two leeks, three carrots,
a stick of celery, a litre and a half of stock, one lemon, a bunch of parsley and some butter.
Rinse the barley until the water stays clear, then toast it dry in a heavy pot until it smells of
nuts; this takes about four minutes, and you must not leave it. Add the butter and the sliced
leeks, and cook them gently until they are soft but not brown. Pour in the stock, add the carrots
and the celery in small cubes, and let everything simmer for forty minutes with the lid half on.
Taste it before you add any salt, because stock differs. At the end stir in the juice of the lemon
and the chopped parsley, and serve it at once. The next day it will be a stew; thin it with water
and do not apologise. If somebody at the table dislikes celery, leave it out and say nothing, and
they will ask you for the recipe.

To the residents of number forty. As some of you know, the pump in the cellar was replaced on the
second of the month. The old one had worked since the house was built, and the company that made
it no longer exists. The new one is quieter, and for this reason several of you have reported that
it is broken. It is not broken. You can convince yourselves by putting a hand on the red pipe,
which is warm. The costs will be shared according to floor area, as we agreed in the spring.
Anyone who wishes to look at the invoices may do so on Thursday evening between six and seven.
Please do not store bicycles in front of the meter; the inspector could not reach it and has
threatened to estimate our consumption, which never ends well for the person who is estimated.

Minutes of the third meeting. Present: all members but two. The treasurer reported that the
account held slightly more than last year, which she attributed to the cancelled excursion. It was
asked whether the excursion could be held in autumn instead. It could, if someone were willing to
organise it. After a silence the item was postponed. The chair described three offers for
repairing the roof. The cheapest did not include scaffolding; the second included scaffolding, but
for a different building; the third was complete and cost twice as much. The meeting decided to
ask the second firm whether it had confused two letters. Under other business a member proposed
that meetings should not last longer than ninety minutes. The proposal was discussed for half an
hour and then accepted.

def merge_intervals(intervals):
    \"\"\"Join intervals that touch or overlap. Each is a pair (start, end) with start <= end.\"\"\"
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged

The function sorts its input first, so that an interval can only overlap the one that was added
last. Sorting costs more than the single pass that follows it, and if the caller can promise
sorted input the whole thing becomes linear. Note that two intervals which merely touch, such as
(1, 2) and (2, 3), are joined; whether that is what you want depends on whether the ends belong to
the intervals. In a calendar they usually do not: a meeting that ends at three does not prevent
another one from starting at three. In that case replace the comparison with a strict one and
change nothing else.

How a harbour silts up. A river carries fine mud as long as it moves quickly. Where it meets the
sea it slows down, the salt makes the smallest grains stick to one another, and the clumps sink.
Each tide stirs a part of them up again and puts them down somewhere else, preferably in the place
that has just been dredged, because that is the deepest and therefore the calmest. For three
hundred years the people of Vessel Quay fought the mud with rakes, then with buckets on a chain,
and finally with a ship whose only purpose was to suck it from the bottom and spit it out beyond
the headland. In the year the ship was sold, a student from the university noticed that the
currents of the flood tide and those of the ebb did not use the same channel. She suggested
closing the smaller of the two with a low wall of stone. The council laughed, then calculated,
then built the wall. The water now leaves faster than it comes, and takes the mud along. The wall
cost as much as the ship had cost in a single year, and it does not need a crew.
"""
